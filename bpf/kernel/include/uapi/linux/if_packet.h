/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* Included by BCC for its packet helpers, which aiflame's programs do not use. */
#ifndef AIFLAME_IF_PACKET_H
#define AIFLAME_IF_PACKET_H
#endif
