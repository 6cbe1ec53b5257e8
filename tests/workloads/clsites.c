/* SPDX-License-Identifier: Apache-2.0 */
/*
 * OpenCL kernels that are launched from up to ten functions. Each has a loop of its own in a kernel,
 * on a line of its own, so that the line of a sample tells who launched it: site N is on line 6 + N.
 * Every second site has a third of the work of the others, in work items or in rounds of its loop.
 *
 * Arguments: milliseconds to launch for; microseconds that a kernel of most work takes; sites;
 * launches that are queued before they are waited for; queues, which take turns; "items" or
 * "rounds"; "finish", "event" or "read": how launches are waited for; "ordered", or "any" for
 * queues that run launches in any order; "random": sites that come at random launch `work`; or
 * "turn": sites in turn launch `other`, of more items and less cost, alike from all, and `work`.
 */
#define _GNU_SOURCE
#include <string.h>
#include "clhost.h"
#include "frames.h"
#include "truth.h"

enum {
	ITEMS = 1024,
	GROUP = 64,
	OTHER_ITEMS = 16 * ITEMS,
	/* It costs a sixth of the most work, of fewer items. */
	OTHER_ROUNDS_PART = 32,
	SITES_MAX = 10,
	QUEUES_MAX = 8,
	DEPTH_MAX = 256,
	SOURCE_MAX = 4096,
	CALIBRATION_ROUNDS = 2000
};

/* Compiled with -g: lines count from 1, the loop of site 0 is on line 6. */
static const char *const SOURCE =
	"__kernel void %s(__global float *data, int rounds, int site)\n"
	"{\n"
	"    float v = data[get_global_id(0)];\n"
	"    switch (site)\n"
	"    {\n"
	"    case 0: for (int i = 0; i < rounds; i++) v = v * 0.991f + 0.51f; break;\n"
	"    case 1: for (int i = 0; i < rounds; i++) v = v * 0.992f - 0.52f; break;\n"
	"    case 2: for (int i = 0; i < rounds; i++) v = v * 0.993f + 0.53f; break;\n"
	"    case 3: for (int i = 0; i < rounds; i++) v = v * 0.994f - 0.54f; break;\n"
	"    case 4: for (int i = 0; i < rounds; i++) v = v * 0.995f + 0.55f; break;\n"
	"    case 5: for (int i = 0; i < rounds; i++) v = v * 0.996f - 0.56f; break;\n"
	"    case 6: for (int i = 0; i < rounds; i++) v = v * 0.997f + 0.57f; break;\n"
	"    case 7: for (int i = 0; i < rounds; i++) v = v * 0.998f - 0.58f; break;\n"
	"    case 8: for (int i = 0; i < rounds; i++) v = v * 0.981f + 0.59f; break;\n"
	"    case 9: for (int i = 0; i < rounds; i++) v = v * 0.982f - 0.61f; break;\n"
	"    }\n"
	"    data[get_global_id(0)] = v;\n"
	"}\n";

static cl_command_queue queues[QUEUES_MAX];
static cl_kernel work, other;
static cl_int rounds;
static int by_items, in_turn;

static cl_kernel kernel_named(const char *name)
{
	char source[SOURCE_MAX];

	snprintf(source, sizeof(source), SOURCE, name);
	return kernel_of(build(source, "-g"), name, 1);
}

static inline __attribute__((always_inline)) void enqueue_kernel(cl_command_queue to,
								 cl_kernel kernel, size_t items,
								 cl_int own_rounds, cl_int site,
								 cl_event *end)
{
	size_t group = GROUP;

	check(clSetKernelArg(kernel, 1, sizeof(own_rounds), &own_rounds), "clSetKernelArg");
	check(clSetKernelArg(kernel, 2, sizeof(site), &site), "clSetKernelArg");
	check(clEnqueueNDRangeKernel(to, kernel, 1, NULL, &items, &group, 0, NULL, end),
	      "clEnqueueNDRangeKernel");
}

static inline __attribute__((always_inline)) void enqueue(cl_command_queue to, cl_int site,
							  cl_event *end)
{
	int most = site % 2 == 0;
	size_t items = by_items && most ? 3 * ITEMS : ITEMS;

	if (in_turn)
		enqueue_kernel(to, other, OTHER_ITEMS, rounds / OTHER_ROUNDS_PART, site, NULL);
	enqueue_kernel(to, work, items, by_items || most ? rounds : rounds / 3, site, end);
}

#define SITE(n)                                                                                    \
	static NOINLINE void site_##n(cl_command_queue to, cl_event *end)                          \
	{                                                                                          \
		KEEP_FRAME();                                                                      \
		enqueue(to, n, end);                                                               \
	}
SITE(0)
SITE(1)
SITE(2)
SITE(3)
SITE(4)
SITE(5)
SITE(6)
SITE(7)
SITE(8)
SITE(9)

static void (*const sites[SITES_MAX])(cl_command_queue, cl_event *) = {
	site_0, site_1, site_2, site_3, site_4, site_5, site_6, site_7, site_8, site_9,
};

/* Waits for all that was queued, by way of one queue after the other. */
static void wait_for(cl_event *ends, int count, const char *way)
{
	float word;

	for (int i = 0; i < count; i++) {
		if (!strcmp(way, "finish"))
			check(clFinish(queues[i]), "clFinish");
		else if (!strcmp(way, "event"))
			check(clWaitForEvents(1, &ends[i]), "clWaitForEvents");
		else
			check(clEnqueueReadBuffer(queues[i], data, CL_TRUE, 0, sizeof(word), &word,
						  0, NULL, NULL),
			      "clEnqueueReadBuffer");
	}
}

/* By the processors' time, which other programs make no longer: PoCL has a worker for each. */
static long long worked_ns(void)
{
	return clock_ns(CLOCK_PROCESS_CPUTIME_ID) / sysconf(_SC_NPROCESSORS_ONLN);
}

static void calibrate(long long kernel_ns)
{
	long long took_ns = 0, start_ns;

	rounds = CALIBRATION_ROUNDS;
	/* The first two compile, and fault in what the kernel touches. */
	for (int i = 0; i < 5; i++) {
		cl_event end;

		start_ns = worked_ns();
		site_0(queues[0], &end);
		check(clFinish(queues[0]), "clFinish");
		clReleaseEvent(end);
		took_ns = worked_ns() - start_ns;
		if (i == 2 && took_ns < 20 * MS)
			rounds = CALIBRATION_ROUNDS * (20.0 * MS / took_ns) + 1;
	}
	rounds = (double)rounds * kernel_ns / took_ns + 1;
	for (int site = 1; site < SITES_MAX; site++) {
		cl_event end;

		sites[site](queues[0], &end);
		check(clFinish(queues[0]), "clFinish");
		clReleaseEvent(end);
	}
}

int main(int argc, char **argv)
{
	long long length_ms = atoll(argv[1]), kernel_us = atoll(argv[2]), until_ns, launches = 0;
	int site_count = atoi(argv[3]), depth = atoi(argv[4]), queue_count = atoi(argv[5]);
	int next = 0;
	unsigned seed = getpid();
	cl_int error;

	if (site_count > SITES_MAX || depth > DEPTH_MAX || queue_count > QUEUES_MAX)
		return 2;
	by_items = !strcmp(argv[6], "items");
	in_turn = !strcmp(argv[9], "turn");
	open_device(OTHER_ITEMS);
	for (int i = 0; i < queue_count; i++) {
		queues[i] = clCreateCommandQueue(
			context, device,
			strcmp(argv[8], "any") ? 0 : CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE,
			&error);
		check(error, "clCreateCommandQueue");
	}
	work = kernel_named("work");
	/* PoCL loses the lines of a kernel that is first launched when its program is cached. */
	if (in_turn)
		other = kernel_named("other");
	calibrate(kernel_us * 1000);
	ready_then_wait();
	until_ns = clock_ns(CLOCK_MONOTONIC) + length_ms * MS;
	while (clock_ns(CLOCK_MONOTONIC) < until_ns) {
		cl_event ends[QUEUES_MAX] = { NULL }, all[DEPTH_MAX];
		int count = 0;

		for (int i = 0; i < depth; i++) {
			int which = next++ % queue_count;

			sites[in_turn ? i % site_count : rand_r(&seed) % site_count](queues[which],
										     &all[count]);
			ends[which] = all[count++];
			launches++;
		}
		for (int i = 0; i < queue_count; i++)
			if (!ends[i])
				ends[i] = all[0];
		wait_for(ends, queue_count, argv[7]);
		for (int i = 0; i < count; i++)
			clReleaseEvent(all[i]);
	}
	say("launches", launches);
	done_then_stay();
	return 0;
}
