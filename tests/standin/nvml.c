/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NVML without a device: as much of its ABI as aiflame.gpu.nvidia.nvml calls. The devices are those
 * of cuda.c.
 *
 * NVML_STANDIN in the environment says what they tell, in words NAME or NAME=VALUE:
 *
 *   devices=N          how many; 1
 *   from=NS            when the curve begins, monotonic; when the library is loaded
 *   curve=A/B/C        percent of each second from then on, and the last for ever; before it is 0.
 *                      Of memory there are 1 GiB in use, and 100 MiB more for each percent
 *   period=US          of samples; 166667. The last 120 are kept
 *   init=NUMBER        nvmlInit fails so
 *   lost=MS            after so long the last device is lost
 *   hang=MS            after so long no call about the last device returns
 *   no-busy no-memory  the last device does not support it
 *   old                there is no nvmlDeviceGetMemoryInfo_v2
 *   no-samples         there are no samples, but the last of them
 *   mig                the first device has two instances, and no busy share
 *   instances=PATH     of these, the ones whose digits are in a file; "?" in it: NVML is not sure
 */
#include "nvml.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
#define TOTAL_BYTES (80ull << 30)
#define RESERVED_BYTES (1ull << 29)
#define KEPT_SAMPLES 120

struct nvml_device {
	unsigned int number;
	int instance; /* -1: the whole device */
};

static struct nvml_device devices[8];
static struct nvml_device instances[2];
static uint64_t from_ns, loaded_ns, to_wall_ns;

static uint64_t now_ns(clockid_t clock)
{
	struct timespec now;

	clock_gettime(clock, &now);
	return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

/* What follows a word, "" where nothing does; NULL where it is not there. */
static const char *word(const char *name)
{
	const char *text = getenv("NVML_STANDIN"), *at = text;
	size_t length = strlen(name);

	while (at && (at = strstr(at, name))) {
		char end = at[length];

		if ((at == text || at[-1] == ' ') && (end == '=' || end == ' ' || !end))
			return at + length + (end == '=');
		at += length;
	}
	return NULL;
}

static uint64_t number(const char *name, uint64_t otherwise)
{
	const char *text = word(name);

	return text ? strtoull(text, NULL, 0) : otherwise;
}

__attribute__((constructor)) static void load(void)
{
	loaded_ns = now_ns(CLOCK_MONOTONIC);
	to_wall_ns = now_ns(CLOCK_REALTIME) - loaded_ns;
	from_ns = number("from", loaded_ns);
}

static unsigned int percent_at(uint64_t at_ns)
{
	const char *curve = word("curve");
	char *end;

	if (!curve || at_ns < from_ns)
		return 0;
	for (uint64_t second = (at_ns - from_ns) / 1000000000ull;; second--) {
		unsigned long percent = strtoul(curve, &end, 10);

		if (!second || *end != '/')
			return (unsigned int)percent;
		curve = end + 1;
	}
}

static bool is_last(nvml_device device)
{
	return device->number + 1 == number("devices", 1);
}

static bool is_after(const char *name)
{
	const char *after_ms = word(name);

	return after_ms && now_ns(CLOCK_MONOTONIC) - loaded_ns >= number(name, 0) * 1000000ull;
}

static nvml_result state_of(nvml_device device)
{
	if (is_last(device) && is_after("hang"))
		for (;;)
			pause();
	return is_last(device) && is_after("lost") ? NVML_GPU_IS_LOST : NVML_SUCCESS;
}

EXPORTED nvml_result nvmlInitWithFlags(unsigned int flags)
{
	(void)flags;
	return (nvml_result)number("init", NVML_SUCCESS);
}

EXPORTED const char *nvmlErrorString(nvml_result result)
{
	(void)result;
	return "Unknown Error";
}

EXPORTED nvml_result nvmlDeviceGetCount_v2(unsigned int *count)
{
	*count = (unsigned int)number("devices", 1);
	return NVML_SUCCESS;
}

EXPORTED nvml_result nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvml_device *device)
{
	devices[index] = (struct nvml_device){ index, -1 };
	*device = &devices[index];
	return NVML_SUCCESS;
}

EXPORTED nvml_result nvmlDeviceGetUUID(nvml_device device, char *text, unsigned int size)
{
	char digits[33] = "";
	unsigned int first = device->instance < 0 ? device->number * 16
						  : 0x80 + (unsigned int)device->instance * 16;

	for (unsigned int at = 0; at < 16; at++)
		sprintf(digits + 2 * at, "%02x", first + at);
	snprintf(text, size, "%s-%.8s-%.4s-%.4s-%.4s-%.12s", device->instance < 0 ? "GPU" : "MIG",
		 digits, digits + 8, digits + 12, digits + 16, digits + 20);
	return NVML_SUCCESS;
}

EXPORTED nvml_result nvmlDeviceGetName(nvml_device device, char *name, unsigned int size)
{
	snprintf(name, size, "Standin %c%s", 'A' + device->number,
		 device->instance < 0 ? "" : " MIG 1g.10gb");
	return NVML_SUCCESS;
}

EXPORTED nvml_result nvmlDeviceGetMigMode(nvml_device device, unsigned int *current,
					  unsigned int *pending)
{
	if (!word("mig"))
		return NVML_NOT_SUPPORTED;
	*current = *pending = !device->number;
	return NVML_SUCCESS;
}

EXPORTED nvml_result nvmlDeviceGetMaxMigDeviceCount(nvml_device device, unsigned int *count)
{
	(void)device;
	*count = 7;
	return NVML_SUCCESS;
}

static nvml_result state_of_instance(unsigned int index)
{
	const char *at = word("instances");
	char path[256], there[8] = "";
	FILE *file;

	if (index >= 2 || !at)
		return index < 2 ? NVML_SUCCESS : NVML_NOT_FOUND;
	snprintf(path, sizeof(path), "%.*s", (int)strcspn(at, " "), at);
	file = fopen(path, "r");
	if (file) {
		if (!fgets(there, sizeof(there), file))
			there[0] = 0;
		fclose(file);
	}
	if (strchr(there, '?'))
		return NVML_UNKNOWN;
	return strchr(there, '0' + (int)index) ? NVML_SUCCESS : NVML_NOT_FOUND;
}

EXPORTED nvml_result nvmlDeviceGetMigDeviceHandleByIndex(nvml_device device, unsigned int index,
							 nvml_device *instance)
{
	nvml_result state = state_of_instance(index);

	if (state)
		return state;
	instances[index] = (struct nvml_device){ device->number, (int)index };
	*instance = &instances[index];
	return NVML_SUCCESS;
}

static bool tells_busy(nvml_device device)
{
	return !(word("no-busy") && is_last(device)) && !(word("mig") && !device->number);
}

EXPORTED nvml_result nvmlDeviceGetUtilizationRates(nvml_device device,
						   struct nvml_utilization *rates)
{
	nvml_result state = state_of(device);

	if (state)
		return state;
	if (!tells_busy(device))
		return NVML_NOT_SUPPORTED;
	*rates = (struct nvml_utilization){ percent_at(now_ns(CLOCK_MONOTONIC)), 7 };
	return NVML_SUCCESS;
}

EXPORTED nvml_result nvmlDeviceGetSamples(nvml_device device, unsigned int kind,
					  unsigned long long after_us, unsigned int *value_kind,
					  unsigned int *count, struct nvml_sample *samples)
{
	nvml_result state = state_of(device);
	uint64_t period_ns = number("period", 166667) * 1000;
	uint64_t now = now_ns(CLOCK_MONOTONIC), newest_ns = now / period_ns * period_ns;
	unsigned int found = 0;

	if (state)
		return state;
	if (kind != NVML_GPU_UTILIZATION_SAMPLES)
		return NVML_INVALID_ARGUMENT;
	if (!tells_busy(device))
		return NVML_NOT_SUPPORTED;
	if (word("no-samples"))
		return NVML_NOT_FOUND;
	*value_kind = NVML_VALUE_UNSIGNED_INT;
	if (!samples) {
		*count = KEPT_SAMPLES;
		return NVML_SUCCESS;
	}
	/* Each is of the period before it. */
	for (unsigned int at = KEPT_SAMPLES; at-- > 0;) {
		uint64_t end_ns = newest_ns - at * period_ns;
		uint64_t end_us = (end_ns + to_wall_ns) / 1000;

		if (end_us <= after_us || found == *count)
			continue;
		samples[found].time_us = end_us;
		samples[found++].value.ui = percent_at(end_ns - period_ns / 2);
	}
	*count = found;
	return found ? NVML_SUCCESS : NVML_NOT_FOUND;
}

static uint64_t used_bytes(nvml_device device)
{
	uint64_t used = (1ull << 30) + percent_at(now_ns(CLOCK_MONOTONIC)) * (100ull << 20);

	return device->instance < 0 ? used : used / 2;
}

EXPORTED nvml_result nvmlDeviceGetMemoryInfo_v2(nvml_device device, struct nvml_memory_v2 *memory)
{
	nvml_result state = state_of(device);

	if (word("old"))
		return NVML_FUNCTION_NOT_FOUND;
	if (state)
		return state;
	if (memory->version != NVML_MEMORY_V2)
		return NVML_VERSION_MISMATCH;
	if (word("no-memory") && is_last(device))
		return NVML_NOT_SUPPORTED;
	memory->total = TOTAL_BYTES;
	memory->reserved = RESERVED_BYTES;
	memory->used = used_bytes(device);
	memory->free = TOTAL_BYTES - RESERVED_BYTES - memory->used;
	return NVML_SUCCESS;
}

EXPORTED nvml_result nvmlDeviceGetMemoryInfo(nvml_device device, struct nvml_memory *memory)
{
	nvml_result state = state_of(device);

	if (state)
		return state;
	if (word("no-memory") && is_last(device))
		return NVML_NOT_SUPPORTED;
	memory->total = TOTAL_BYTES;
	memory->used = RESERVED_BYTES + used_bytes(device);
	memory->free = TOTAL_BYTES - memory->used;
	return NVML_SUCCESS;
}
