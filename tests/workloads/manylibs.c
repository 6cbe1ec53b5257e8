/* SPDX-License-Identifier: Apache-2.0 */
/*
 * manylibs FOLDER: loads every file of a folder as a library, and calls the function `work` of each
 * in turn until it is killed: a program with more mapped files than descriptors.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <limits.h>

#include "truth.h"

enum { MOST = 4096 };

int main(int argc, char **argv)
{
	static int (*work[MOST])(int);
	struct dirent *entry;
	DIR *folder = opendir(argc > 1 ? argv[1] : ".");
	int count = 0, i;

	while (folder && count < MOST && (entry = readdir(folder))) {
		char path[PATH_MAX];
		void *library;

		if (entry->d_name[0] == '.')
			continue;
		snprintf(path, sizeof(path), "%s/%s", argv[1], entry->d_name);
		library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
		if (!library)
			fail(dlerror());
		work[count++] = (int (*)(int))dlsym(library, "work");
	}
	alarm(3 * LONGEST_LIFE_S); /* a recorder takes a while for its files */
	puts("ready");
	fflush(stdout);
	for (;;)
		for (i = 0; i < count; i++)
			work[i](i);
}
