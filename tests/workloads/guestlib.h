/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GUESTLIB_H
#define GUESTLIB_H

enum { GUEST_CPU_NS = 150000000 };

void compute_in_library(void);

#endif
