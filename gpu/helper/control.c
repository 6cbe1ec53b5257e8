/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "control.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

/* Its owner's to read, everybody's to write. */
#define PIPE_MODE 0622

static int pipe_fd = -1, bell_fd = -1, poll_fd = -1;
static _Atomic bool sleeps, was_rung;

static int watch(int fd)
{
	/*
	 * Edge-triggered: a pipe without a writer is at its end all the time, and is no reason to
	 * wake up more than once.
	 */
	struct epoll_event event = { .events = EPOLLIN | EPOLLET, .data.fd = fd };

	return epoll_ctl(poll_fd, EPOLL_CTL_ADD, fd, &event);
}

static bool make(void)
{
	int ends[2];

	poll_fd = epoll_create1(EPOLL_CLOEXEC);
	bell_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (poll_fd < 0 || bell_fd < 0 || watch(bell_fd))
		return false;
	if (pipe2(ends, O_CLOEXEC | O_NONBLOCK))
		return false;
	/* No end for writing stays: children would have it, and nobody would notice who has gone. */
	close(ends[1]);
	pipe_fd = ends[0];
	/*
	 * It has no name: by /proc only who may read this process's memory gets to it, and its own
	 * forks have it. A recorder in a container may do the former, and without CAP_DAC_OVERRIDE
	 * open no other user's files.
	 */
	fchmod(pipe_fd, PIPE_MODE);
	return !watch(pipe_fd);
}

static void close_one(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

int control_make(void)
{
	if (!make())
		control_end();
	return pipe_fd;
}

void control_end(void)
{
	close_one(&pipe_fd);
	close_one(&bell_fd);
	close_one(&poll_fd);
}

enum control_found control_read(struct control *message)
{
	ssize_t size = read(pipe_fd, message, sizeof(*message));

	if (size == 0)
		return CONTROL_NOBODY;
	if (size < 0)
		return errno == EAGAIN || errno == EINTR ? CONTROL_NOTHING : CONTROL_NOBODY;
	/* A message is written at once, which a pipe does not divide: pipe(7), PIPE_BUF. */
	if (size != sizeof(*message) || message->magic != CONTROL_MAGIC ||
	    message->version != PROTOCOL_VERSION)
		return CONTROL_BAD;
	return CONTROL_MESSAGE;
}

bool control_wait(int timeout_ms)
{
	struct epoll_event events[2];
	bool is_there = true;
	uint64_t count;

	atomic_store(&sleeps, true);
	/* Who rings after this sees that somebody sleeps. */
	if (!atomic_exchange(&was_rung, false) && epoll_wait(poll_fd, events, 2, timeout_ms) < 0)
		is_there = errno == EINTR;
	atomic_store(&sleeps, false);
	while (is_there && read(bell_fd, &count, sizeof(count)) > 0)
		;
	return is_there;
}

void control_wake(void)
{
	uint64_t one = 1;

	atomic_store(&was_rung, true);
	if (atomic_exchange(&sleeps, false) && write(bell_fd, &one, sizeof(one)) < 0)
		return;
}
