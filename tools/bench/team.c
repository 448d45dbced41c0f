/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <string.h>

#include "bench.h"
#include "team.h"

static void member_work(TeamMember *member) {
	Team *team = member->team;
	uint64_t begin;

	team->work(team->data, member->number, team->warm_up);
	atomic_fetch_add(&team->n_ready, 1);
	while (atomic_load_explicit(&team->n_ready, memory_order_acquire) < team->n_at_work)
		;
	begin = bench_now_ns();
	team->work(team->data, member->number, team->count);
	member->ns = bench_now_ns() - begin;
	atomic_fetch_add(&team->n_done, 1);
}

static void member_wait(TeamMember *member) {
	while (sem_wait(&member->go) < 0 && errno == EINTR)
		;
}

static void *member_main(void *data) {
	TeamMember *member = data;

	(void)bench_pin(member->number % bench_n_cpus());
	for (member_wait(member); member->team->work; member_wait(member))
		member_work(member);
	return NULL;
}

void team_init(Team *team) {
	*team = (Team){ .n = TEAM_MAX };
	if (!bench_pin(0))
		bench_die("this thread cannot be bound to a CPU");
	for (uint32_t i = 0; i < team->n; ++i) {
		TeamMember *member = &team->members[i];
		int r;

		member->team = team;
		member->number = i;
		if (!i)
			continue;
		if (sem_init(&member->go, 0, 0) < 0)
			bench_die("sem_init: %s", strerror(errno));
		r = pthread_create(&member->thread, NULL, member_main, member);
		if (r)
			bench_die("pthread_create: %s", strerror(r));
	}
}

void team_deinit(Team *team) {
	team->work = NULL;
	for (uint32_t i = 1; i < team->n; ++i) {
		(void)sem_post(&team->members[i].go);
		(void)pthread_join(team->members[i].thread, NULL);
		(void)sem_destroy(&team->members[i].go);
	}
}

uint64_t team_run(Team *team, uint32_t n_threads, TeamWork work, void *data, uint64_t warm_up, uint64_t count) {
	uint64_t ns = 0;

	team->work = work;
	team->data = data;
	team->warm_up = warm_up;
	team->count = count;
	team->n_at_work = n_threads;
	atomic_store(&team->n_ready, 0);
	atomic_store(&team->n_done, 0);
	for (uint32_t i = 1; i < n_threads; ++i)
		(void)sem_post(&team->members[i].go);
	member_work(&team->members[0]);
	while (atomic_load_explicit(&team->n_done, memory_order_acquire) < n_threads)
		;
	for (uint32_t i = 0; i < n_threads; ++i)
		ns += team->members[i].ns;
	return ns / n_threads;
}
