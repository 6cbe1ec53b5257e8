/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Three OpenCL kernels, launched round robin from functions of their own. `scale` has two call
 * sites, with global sizes 3 to 1 and so, as its work items all do the same, with work 3 to 1.
 * A launch is waited for before the next one. All are compiled before "ready".
 *
 * Arguments: how many milliseconds to launch for; options of the compiler.
 * Measures launches of each call site, and the time between a launch and its end by call site.
 */
#define _GNU_SOURCE
#include "clhost.h"
#include "frames.h"
#include "truth.h"

enum { ITEMS = 4096, ROUNDS = 500, SITES = 4 };

static const char *const SOURCE = "__kernel void scale(__global float *data, int rounds)\n"
				  "{\n"
				  "    float value = data[get_global_id(0)];\n"
				  "    for (int i = 0; i < rounds; i++)\n"
				  "        value = value * 0.999f + 0.5f;\n"
				  "    data[get_global_id(0)] = value;\n"
				  "}\n"
				  "\n"
				  "__kernel void divide(__global float *data, int rounds)\n"
				  "{\n"
				  "    float value = data[get_global_id(0)];\n"
				  "    for (int i = 0; i < rounds; i++)\n"
				  "        value = 7.0f / (value + 1.0f);\n"
				  "    data[get_global_id(0)] = value;\n"
				  "}\n"
				  "\n"
				  "__kernel void stir(__global float *data, int rounds)\n"
				  "{\n"
				  "    uint value = get_global_id(0);\n"
				  "    for (int i = 0; i < rounds; i++)\n"
				  "        value = value * 1664525u + 1013904223u;\n"
				  "    data[get_global_id(0)] = value;\n"
				  "}\n";

static cl_kernel scale, divide, stir;

static NOINLINE void scale_most(void)
{
	KEEP_FRAME();
	launch(scale, 3 * ITEMS);
}

static NOINLINE void scale_rest(void)
{
	KEEP_FRAME();
	launch(scale, ITEMS);
}

static NOINLINE void divide_all(void)
{
	KEEP_FRAME();
	launch(divide, ITEMS);
}

static NOINLINE void stir_all(void)
{
	KEEP_FRAME();
	launch(stir, ITEMS);
}

static const struct {
	const char *name;
	void (*call)(void);
} sites[SITES] = {
	{ "scale_most", scale_most },
	{ "scale_rest", scale_rest },
	{ "divide_all", divide_all },
	{ "stir_all", stir_all },
};

int main(int argc, char **argv)
{
	long long counts[SITES] = { 0 }, ns[SITES] = { 0 };
	long long until_ns, now_ns, length_ms = argc > 1 ? atoll(argv[1]) : 1000;
	cl_program program;

	open_device(3 * ITEMS);
	program = build(SOURCE, argc > 2 ? argv[2] : "");
	scale = kernel_of(program, "scale", ROUNDS);
	divide = kernel_of(program, "divide", ROUNDS);
	stir = kernel_of(program, "stir", ROUNDS);
	for (int site = 0; site < SITES; site++)
		sites[site].call();
	ready_then_wait();
	now_ns = clock_ns(CLOCK_MONOTONIC);
	until_ns = now_ns + length_ms * MS;
	while (now_ns < until_ns) {
		for (int site = 0; site < SITES; site++) {
			long long before_ns = now_ns;

			sites[site].call();
			now_ns = clock_ns(CLOCK_MONOTONIC);
			ns[site] += now_ns - before_ns;
			counts[site]++;
		}
	}
	for (int site = 0; site < SITES; site++) {
		printf("%s.launches %lld\n%s.ns %lld\n", sites[site].name, counts[site],
		       sites[site].name, ns[site]);
	}
	done_then_stay();
	return 0;
}
