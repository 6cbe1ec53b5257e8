/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A reference for what speaks the protocol of gpu/PROTOCOL.md: a program that is its own target, of a
 * device that does not exist. Once it is started through its pipe it "launches" a kernel each 10 ms,
 * which is told with its time and two stalls, until it is stopped or nobody listens any more.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <unistd.h>

#include "control.h"
#include "memory.h"
#include "probes.h"

enum { DEVICE = 0, CONTEXT = 1, NAME_KERNEL = 1, NAME_REASON = 2, REASON = 4, PERIOD_MS = 10 };

static const uint64_t code = 0xc0de, kernel_ns = 5000;

static void put_name(uint32_t name, const char *text)
{
	struct fact_name fact = { name, 0 };

	fact_put(FACT_NAME, (struct part[]){ PART(fact), part_of_text(text) }, 2);
}

static void put_hello(enum tier tier, const char *why)
{
	struct fact_hello fact = { PROTOCOL_VERSION, getpid(), tier, 0 };

	fact_put(FACT_HELLO,
		 (struct part[]){ PART(fact), part_of_text("reference"), part_of_text("1"),
				  part_of_text("no library"), part_of_text("no driver"),
				  part_of_text(why) },
		 6);
}

/* What stays true: before anything in the ring speaks of it. */
static void put_facts(void)
{
	struct fact_device device = { DEVICE, 4, 1000000, 1, 0, "a device's uuid" };
	struct fact_context context = { CONTEXT, DEVICE, 1 << 20 };
	struct fact_reasons reasons = { CONTEXT, 1 };
	struct reason reason = { REASON, NAME_REASON };
	struct fact_code loaded = { code, now_ns(), 4, CONTEXT, 1 };

	put_hello(TIER_LAUNCHES, "nobody has asked for it");
	put_name(NAME_KERNEL, "_Z5scalePf");
	put_name(NAME_REASON, "waits_for_memory");
	fact_put(FACT_DEVICE, (struct part[]){ PART(device), part_of_text("Reference 1") }, 2);
	fact_put(FACT_CONTEXT, &PART(context), 1);
	fact_put(FACT_REASONS, (struct part[]){ PART(reasons), PART(reason) }, 2);
	fact_put(FACT_CODE, (struct part[]){ PART(loaded), { "code", 4 } }, 2);
}

static void put_state(enum tier tier, enum why why)
{
	struct passing_state state = { .at_ns = now_ns(), .tier = tier, .why = why };

	ring_put(PASSING_STATE, &PART(state), 1);
	put_hello(tier, tier == TIER_LAUNCHES ? "nobody has asked for it" : "");
	aiflame_gpu_bell();
}

static void launch(void)
{
	static uint64_t launches;
	uint64_t begin_ns = now_ns();
	struct kernel_time time = { .launch = ++launches,
				    .begin_ns = begin_ns,
				    .end_ns = begin_ns + kernel_ns,
				    .queue = 7,
				    .name = NAME_KERNEL,
				    .device = DEVICE,
				    .context = CONTEXT };
	struct passing_stalls head = { begin_ns, begin_ns + kernel_ns, CONTEXT, DEVICE, 0 };
	struct stall stalls[] = {
		{ code, 0x10, launches, NAME_KERNEL, 1, REASON, 3 },
		{ code, 0x20, launches, NAME_KERNEL, 1, REASON, 1 },
	};

	aiflame_gpu_launch(launches, 0x5ca1e, 7);
	ring_put(PASSING_TIMES, &PART(time), 1);
	ring_put(PASSING_STALLS, (struct part[]){ PART(head), PART(stalls) }, 2);
}

int main(void)
{
	enum control_found found = CONTROL_NOBODY;
	struct control message;
	bool is_on = false;
	int control_fd;

	/* A test that fails must not leave this behind. */
	alarm(100);
	if (memory_make("aiflame-reference"))
		return 1;
	control_fd = control_make();
	put_facts();
	memory_publish(control_fd);
	aiflame_gpu_bell();
	for (;;) {
		while ((found = control_read(&message)) == CONTROL_MESSAGE) {
			bool starts = message.verb == VERB_START;

			if (starts != is_on)
				put_state(starts ? TIER_STALLS : TIER_LAUNCHES, WHY_ASKED);
			is_on = starts;
		}
		if (found == CONTROL_NOBODY && is_on) {
			is_on = false;
			put_state(TIER_LAUNCHES, WHY_RECORDER_GONE);
		}
		if (is_on)
			launch();
		control_wait(is_on ? PERIOD_MS : -1);
	}
}
