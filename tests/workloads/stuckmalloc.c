/* SPDX-License-Identifier: Apache-2.0 */
/* An allocator in place of libc's, which never comes back to who wants one certain size. */
#include <stddef.h>
#include <unistd.h>

void *__libc_malloc(size_t size);
void __libc_free(void *block);

__attribute__((noinline)) static void wait_for_ever(void)
{
	for (;;)
		pause();
}

void *malloc(size_t size)
{
	if (size == 77777)
		wait_for_ever();
	return __libc_malloc(size);
}

void free(void *block)
{
	__libc_free(block);
}
