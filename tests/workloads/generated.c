// SPDX-License-Identifier: Apache-2.0
/* Runs code that no file holds, until it is killed. */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

static const unsigned char loop[] = { 0xeb, 0xfe }; /* jmp . */

int main(void)
{
	void *code = mmap(NULL, 4096, PROT_READ | PROT_WRITE | PROT_EXEC,
			  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (code == MAP_FAILED)
		return 1;
	memcpy(code, loop, sizeof(loop));
	puts("ready");
	fflush(stdout);
	((void (*)(void))code)();
	return 0;
}
