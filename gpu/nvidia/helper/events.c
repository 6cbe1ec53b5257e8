/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bounded queue of Dmitry Vyukov: each slot has a turn, by which those who push and the one who
 * takes know whose it is.
 */
#include "events.h"

#include <stdatomic.h>

#include "control.h"
#include "memory.h"

/* A power of two: graphs of large models have some thousand nodes, which come at once. */
#define SLOTS (1u << 14)

struct slot {
	/* 0 in the beginning, so that its pages are touched when they are used only: of slot n, its
	 * turn is this plus n. */
	_Atomic uint64_t turn;
	struct event event;
};

static struct slot slots[SLOTS];
static _Atomic uint64_t pushed;
static uint64_t taken;

bool event_push(const struct event *event)
{
	uint64_t at = atomic_load_explicit(&pushed, memory_order_relaxed);
	struct slot *slot;

	for (;;) {
		uint64_t turn;

		slot = &slots[at % SLOTS];
		turn = atomic_load_explicit(&slot->turn, memory_order_acquire) + at % SLOTS;
		if (turn == at) {
			if (atomic_compare_exchange_weak(&pushed, &at, at + 1))
				break;
		} else if (turn < at) {
			losses_add(LOSS_EVENTS, 1);
			return false;
		} else {
			at = atomic_load_explicit(&pushed, memory_order_relaxed);
		}
	}
	slot->event = *event;
	atomic_store_explicit(&slot->turn, at + 1 - at % SLOTS, memory_order_release);
	/* Nodes and launches wait for the next turn. */
	if (at % (SLOTS / 4) == 0 || event->kind < EVENT_NODE)
		control_wake();
	return true;
}

bool event_take(struct event *event)
{
	uint64_t index = taken % SLOTS;
	struct slot *slot = &slots[index];

	if (atomic_load_explicit(&slot->turn, memory_order_acquire) + index != taken + 1)
		return false;
	*event = slot->event;
	atomic_store_explicit(&slot->turn, taken + SLOTS - index, memory_order_release);
	taken++;
	return true;
}
