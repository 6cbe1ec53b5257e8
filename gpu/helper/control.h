/* SPDX-License-Identifier: Apache-2.0 */
/* The pipe by which a recorder tells a helper what to do (gpu/PROTOCOL.md), and the helper's sleep. */
#ifndef AIFLAME_CONTROL_H
#define AIFLAME_CONTROL_H

#include <stdbool.h>

#include "protocol.h"

enum control_found {
	CONTROL_NOTHING, /* and somebody has the pipe open */
	CONTROL_MESSAGE,
	CONTROL_BAD, /* what was written is no message */
	CONTROL_NOBODY, /* and nothing is left to read */
};

/* Returns the descriptor that the recorder opens, or -1: then none stays open. */
int control_make(void);

/* Nobody will wait: its descriptors are the target's again. */
void control_end(void);

enum control_found control_read(struct control *message);

/*
 * Sleeps until somebody writes, has gone, or calls control_wake; at most timeout_ms, -1: for ever.
 * Returns false where the process has closed what that takes.
 */
bool control_wait(int timeout_ms);

/* From any thread. It is cheap where nobody sleeps. */
void control_wake(void);

#endif
