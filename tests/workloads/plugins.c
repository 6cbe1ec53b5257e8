/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plugins LIBRARY...: loads one library after the other (plugin.c), and has each compute for a
 * moment at the end of its own chain of calls, once: it is over before a table could be built.
 */
#define _GNU_SOURCE
#include <dlfcn.h>

#include "truth.h"

typedef void (*plugin_function)(void);

static NOINLINE void run_plugin(plugin_function run)
{
	run();
	__asm__ volatile(""); /* no jump instead of the call */
}

int main(int argc, char **argv)
{
	ready_then_wait();
	for (int i = 1; i < argc; i++) {
		void *library = dlopen(argv[i], RTLD_NOW | RTLD_LOCAL);

		if (!library)
			fail(dlerror());
		run_plugin((plugin_function)dlsym(library, "plugin"));
	}
	done_then_stay();
	return 0;
}
