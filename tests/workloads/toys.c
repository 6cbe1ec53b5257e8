/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Launches kernels of a device that does not exist, through toyhelper.c, and knows how long each
 * ran. Arguments: how many rounds, and what is wrong: "sound", the name of a lie about the ring
 * ("size", "head", "magic", "record", "shrink", "numbers"), "ids" for numbers that are all the same,
 * or "times" for times that cannot be. With TOY_LATE in its
 * environment it begins to share memory once it may go, and not before.
 *
 * In a round `scale` is launched three times by often() and once by seldom(), where it takes ten
 * times as long; `fill` by seldom() alone, which calls the API, and often() its helper. Launches are numbered with gaps, as by a runtime that
 * numbers all calls.
 */
#define _GNU_SOURCE
#include <string.h>

#include "toyhelper.h"
#include "truth.h"

enum { SCALE = 0x5ca1e0, FILL = 0xf1110, BATCH = 64, ROUND_NS = 1 * MS };

static struct toy_time times[BATCH];
static unsigned int waiting;
static uint64_t launch_id = 40;
static const char *wrong;
static long long on_device_ns[2], launches[2];

static void put_times(void)
{
	toy_put(TOY_TIMES, times, waiting * sizeof(times[0]));
	waiting = 0;
}

static void ran(uint64_t id, uint64_t handle, long long took_ns)
{
	uint64_t end_ns = clock_ns(CLOCK_MONOTONIC);

	times[waiting] = (struct toy_time){ id, handle, end_ns - took_ns, end_ns };
	if (!strcmp(wrong, "times")) {
		times[waiting].begin_ns = 1;
		times[waiting].end_ns = waiting % 2 ? 1ull << 62 : end_ns;
	}
	if (++waiting == BATCH)
		put_times();
}

/* What all sites call: it is told by its caller alone. */
static NOINLINE void launch(int site, uint64_t handle, long long took_ns)
{
	uint64_t id = strcmp(wrong, "ids") ? launch_id += 3 : 7;

	if (site)
		toy_enqueue(handle, 0x9000, id);
	else
		toy_launch(id, handle, 0x9000);
	ran(id, handle, took_ns);
	launches[site]++;
	on_device_ns[site] += took_ns;
}

static NOINLINE void often(void)
{
	launch(0, SCALE, 2000);
}

static NOINLINE void seldom(void)
{
	launch(1, SCALE, 20000);
	launch(1, FILL, 5000);
}

static void name(uint64_t handle, const char *text)
{
	struct toy_kernel kernel = { handle, "" };

	strcpy(kernel.name, text);
	toy_kernel(handle, text);
	toy_put(TOY_KERNEL, &kernel, sizeof(kernel));
}

static enum lie lie(void)
{
	static const char *const lies[] = { "",	      "size",	"head",	  "magic",
					    "record", "shrink", "numbers" };

	for (int i = 1; i < 7; i++)
		if (!strcmp(wrong, lies[i]))
			return i;
	return LIE_NONE;
}

int main(int argc, char **argv)
{
	int rounds = atoi(argv[1]);

	(void)argc;
	wrong = argv[2];
	ready_then_wait();
	if (getenv("TOY_LATE"))
		toy_begin();
	name(SCALE, "scale");
	name(FILL, "fill");
	for (int round = 0; round < rounds; round++) {
		for (int i = 0; i < 3; i++)
			often();
		seldom();
		if (round == rounds / 2)
			toy_lie(lie());
		sleep_ns(ROUND_NS);
	}
	put_times();
	say("often.launches", launches[0]);
	say("often.ns", on_device_ns[0]);
	say("seldom.launches", launches[1]);
	say("seldom.ns", on_device_ns[1]);
	done_then_stay();
	return 0;
}
