/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Functions that glibc 2.32 and 2.34 moved into libc.so.6 under a new version, by their old one: what
 * is built here has to load in containers of glibc 2.17 on.
 */
#ifndef AIFLAME_OLD_GLIBC_H
#define AIFLAME_OLD_GLIBC_H

#ifdef __x86_64__
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5");
__asm__(".symver dlclose, dlclose@GLIBC_2.2.5");
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
__asm__(".symver dlinfo, dlinfo@GLIBC_2.3.3");
__asm__(".symver pthread_mutex_trylock, pthread_mutex_trylock@GLIBC_2.2.5");
__asm__(".symver pthread_create, pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_sigmask, pthread_sigmask@GLIBC_2.2.5");
#endif

#endif
