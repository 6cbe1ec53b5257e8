/* SPDX-License-Identifier: Apache-2.0 */
/* Texts by number. For one thread at a time. */
#ifndef AIFLAME_NAMES_H
#define AIFLAME_NAMES_H

#include <stdbool.h>
#include <stdint.h>

/* Returns the number of a text, which is told once; 0 for none, and where there is no room. */
uint32_t name_of(const char *text);

/*
 * The same for a text that CUPTI has made for its samples: who gets it may free it, but not while other
 * records share it (cupti_pcsampling.h), so it is kept, and looked at once. *is_too_many is set where
 * there are more of them within a day than a process has functions: then CUPTI makes them anew each
 * time, and memory grows.
 */
uint32_t name_of_function(const char *text, bool *is_too_many);

#endif
