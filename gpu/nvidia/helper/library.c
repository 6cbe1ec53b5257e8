/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "old_glibc.h"
#include "library.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Libraries of CUDA beside which a wheel or a toolkit has its libcupti. */
#define MOST_NEIGHBOURS 8

struct cupti cupti;
struct cuda cuda;

struct mapped {
	char driver[PATH_MAX];
	char cupti[PATH_MAX];
	char neighbours[MOST_NEIGHBOURS][PATH_MAX];
	int neighbour_count;
};

static char found_path[PATH_MAX];

const char *library_path(void)
{
	return found_path;
}

static bool is_neighbour(const char *name)
{
	static const char *const begins[] = { "libcudart.so", "libnvrtc.so", "libcublas.so",
					      "libcudnn.so" };

	for (size_t at = 0; at < sizeof(begins) / sizeof(*begins); at++)
		if (!strncmp(name, begins[at], strlen(begins[at])))
			return true;
	return false;
}

/* Takes the paths only: the loader is locked. */
static int look_at(struct dl_phdr_info *info, size_t size, void *data)
{
	struct mapped *mapped = data;
	const char *path = info->dlpi_name, *name = path ? strrchr(path, '/') : NULL;

	(void)size;
	if (!name || strlen(path) >= PATH_MAX)
		return 0;
	name++;
	if (!strncmp(name, "libcupti.so", strlen("libcupti.so")))
		strcpy(mapped->cupti, path);
	else if (!strncmp(name, "libcuda.so", strlen("libcuda.so")))
		strcpy(mapped->driver, path);
	else if (is_neighbour(name) && mapped->neighbour_count < MOST_NEIGHBOURS)
		strcpy(mapped->neighbours[mapped->neighbour_count++], path);
	return 0;
}

/* Libraries that are installed: the first that samples stalls, else the first that there is. */
struct choice {
	void *sufficient, *other;
};

/* Whether stalls can be sampled with a version: one that is newer than the driver does not work. */
static bool is_sufficient(uint32_t version)
{
	int driver = 0;

	/* From CUDA 13 on: 130000; drivers have 13000. */
	if (version >= 130000 && cuda.cuDriverGetVersion && !cuda.cuDriverGetVersion(&driver) &&
	    (uint32_t)driver / 1000 < version / 10000)
		return false;
	return version >= OLDEST_CUPTI_FOR_STALLS;
}

static void try_path(struct choice *choice, const char *path)
{
	cupti_result (*get_version)(uint32_t *);
	uint32_t version = 0;
	void *library;

	if (choice->sufficient)
		return;
	library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
	if (!library)
		return;
	get_version = (__typeof__(get_version))dlsym(library, "cuptiGetVersion");
	if (get_version && !get_version(&version) && is_sufficient(version))
		choice->sufficient = library;
	else if (!choice->other)
		choice->other = library;
	else
		dlclose(library);
}

static void try_at(struct choice *choice, const char *folder, const char *below, int major)
{
	char path[PATH_MAX];

	if (snprintf(path, sizeof(path), "%s/%slibcupti.so.%d", folder, below, major) < PATH_MAX)
		try_path(choice, path);
}

/*
 * Beside one of CUDA's libraries: PyPI's wheels for CUDA 12 have a folder each, those for 13 share
 * one, toolkits have it beside their own or under extras.
 */
static void try_beside(struct choice *choice, char *path)
{
	static const char *const below[] = { "", "../../cuda_cupti/lib/",
					     "../extras/CUPTI/lib64/" };
	int wanted = 12;

	/* cuDNN counts otherwise; the older one is enough. */
	if (strstr(path, ".so.13"))
		wanted = 13;
	*strrchr(path, '/') = 0;
	for (size_t at = 0; at < sizeof(below) / sizeof(*below); at++)
		try_at(choice, path, below[at], wanted);
}

static void try_installed(struct choice *choice)
{
	static const char *const names[] = { "libcupti.so.12", "libcupti.so.13" };
	static const char *const folders[] = { "/usr/local/cuda/lib64",
					       "/usr/local/cuda/extras/CUPTI/lib64" };

	/* The oldest: one that is newer than the driver does not work, an older one does. */
	for (int at = 0; at < 2; at++)
		try_path(choice, names[at]);
	for (int at = 0; at < 4; at++)
		try_at(choice, folders[at / 2], "", 12 + at % 2);
}

static void *open_cupti(struct mapped *mapped)
{
	struct choice choice = { NULL, NULL };
	void *library = NULL;

	/* Two copies would both want to be the one that the driver calls. */
	if (*mapped->cupti)
		library = dlopen(mapped->cupti, RTLD_LAZY | RTLD_NOLOAD);
	if (library)
		return library;
	for (int at = 0; at < mapped->neighbour_count; at++)
		try_beside(&choice, mapped->neighbours[at]);
	try_installed(&choice);
	if (!choice.sufficient)
		return choice.other;
	if (choice.other)
		dlclose(choice.other);
	return choice.sufficient;
}

/* Returns the first function that is not there, of those for kernel times; *lacks is for stalls. */
static const char *bind_cupti(void *library, const char **lacks)
{
	const char *missing = NULL;

#define BIND(name) (cupti.name = (__typeof__(cupti.name))dlsym(library, #name))
#define NEEDED(name, arguments)                                                                    \
	if (!BIND(name) && !missing)                                                               \
		missing = #name;
#define FOR_STALLS(name, arguments)                                                                \
	if (!BIND(name) && !*lacks)                                                                \
		*lacks = #name;
#define OPTIONAL(name, arguments) BIND(name);
	CUPTI_FUNCTIONS(NEEDED, FOR_STALLS, OPTIONAL)
#undef BIND
#undef NEEDED
#undef FOR_STALLS
#undef OPTIONAL
	return missing;
}

static void bind_cuda(void *library)
{
#define BIND(name, arguments) cuda.name = (__typeof__(cuda.name))dlsym(library, #name);
	CUDA_FUNCTIONS(BIND)
#undef BIND
}

/*
 * CUPTI may initialise the driver, which a program is to do by itself: what it forks afterwards could
 * not use CUDA any more.
 */
static bool is_used(void)
{
	int count;

	return !cuda.cuDeviceGetCount || cuda.cuDeviceGetCount(&count) != CUDA_NOT_INITIALIZED;
}

static enum library_found find(bool is_in_init, const char **what, const char **lacks)
{
	struct mapped *mapped = calloc(1, sizeof(*mapped));
	enum library_found found = LIBRARY_FOUND;
	struct link_map *map;
	void *driver, *library;

	if (!mapped)
		return LIBRARY_NO_CUDA;
	dl_iterate_phdr(look_at, mapped);
	driver = *mapped->driver ? dlopen(mapped->driver, RTLD_LAZY | RTLD_NOLOAD) : NULL;
	if (driver)
		bind_cuda(driver);
	if (driver && !is_in_init && !is_used())
		found = LIBRARY_UNUSED;
	library = driver && found == LIBRARY_FOUND ? open_cupti(mapped) : NULL;
	free(mapped);
	if (!driver)
		return LIBRARY_NO_CUDA;
	if (found == LIBRARY_UNUSED)
		return found;
	if (!library)
		return LIBRARY_NO_CUPTI;
	if (!dlinfo(library, RTLD_DI_LINKMAP, &map) && strlen(map->l_name) < PATH_MAX)
		strcpy(found_path, map->l_name);
	*what = bind_cupti(library, lacks);
	if (*what)
		found = LIBRARY_LACKS;
	return found;
}

enum library_found library_find(bool is_in_init, const char **what, const char **lacks)
{
	static bool is_found;
	static const char *lacking;

	if (!is_found) {
		enum library_found found = find(is_in_init, what, &lacking);

		if (found != LIBRARY_FOUND)
			return found;
		is_found = true;
	}
	*lacks = lacking;
	return LIBRARY_FOUND;
}
