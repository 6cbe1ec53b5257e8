/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* BCC counts ring buffers in pages. PAGE_SIZE is passed with -D by the host half (sysconf). */
#ifndef AIFLAME_PAGE_H
#define AIFLAME_PAGE_H

#ifndef PAGE_SIZE
#define PAGE_SIZE 4096
#endif

#endif
