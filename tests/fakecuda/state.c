/* SPDX-License-Identifier: Apache-2.0 */

#include "state.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

FakeState fake;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int record_fd = -1;

static const char *directory(void) {
	const char *path = getenv("FAKECUDA_DIR");

	return path && *path ? path : "/nonexistent";
}

/* all of a small file, with a NUL behind it; empty when there is none */
static void read_file(const char *name, char *ret, size_t size) {
	char path[4096];
	ssize_t n = 0;
	int fd;

	(void)snprintf(path, sizeof(path), "%s/%s", directory(), name);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd >= 0) {
		n = read(fd, ret, size - 1);
		(void)close(fd);
	}
	ret[n > 0 ? n : 0] = 0;
}

bool fake_setting(const char *key, char *ret, size_t size) {
	char name[64], text[4096], *rest = text;
	const char *own;
	size_t length = strlen(key);

	(void)snprintf(name, sizeof(name), "FAKECUDA_%s", key);
	own = getenv(name);
	if (own) {
		(void)snprintf(ret, size, "%s", own);
		return true;
	}
	read_file("settings", text, sizeof(text));
	for (char *line; (line = strsep(&rest, "\n"));)
		if (!strncmp(line, key, length) && line[length] == '=') {
			(void)snprintf(ret, size, "%s", line + length + 1);
			return true;
		}
	return false;
}

bool fake_setting_is(const char *key, const char *value) {
	char text[256];

	return fake_setting(key, text, sizeof(text)) && !strcmp(text, value);
}

uint64_t fake_setting_number(const char *key, uint64_t otherwise) {
	char text[64];

	return fake_setting(key, text, sizeof(text)) ? strtoull(text, NULL, 0) : otherwise;
}

CUresult fake_refusal(void) {
	return (CUresult)fake_setting_number("U4", CUDA_ERROR_INVALID_VALUE);
}

void fake_path(char ret[4096], const char *kind, uint64_t id) {
	(void)snprintf(ret, 4096, "%s/%s-%016llx", directory(), kind, (unsigned long long)id);
}

uint64_t fake_random(void) {
	uint64_t value = 0;

	while (!value)
		if (getrandom(&value, sizeof(value), 0) != sizeof(value))
			abort();
	return value;
}

bool fake_parse_uuid(const char *text, uint8_t ret[16]) {
	size_t n = 0;

	if (strncmp(text, "GPU-", 4) && strncmp(text, "MIG-", 4))
		return false;
	for (text += 4; *text && n < 32; ++text) {
		const char *digits = "0123456789abcdef", *digit = strchr(digits, *text | 0x20);

		if (*text == '-')
			continue;
		if (!digit)
			return false;
		ret[n / 2] = (uint8_t)(n % 2 ? ret[n / 2] | (digit - digits) : (digit - digits) << 4);
		n++;
	}
	return n == 32 && !*text;
}

static void delay_ms(uint64_t ms) {
	struct timespec ts = { (time_t)(ms / 1000), (long)(ms % 1000) * 1000000 };

	(void)nanosleep(&ts, NULL);
}

static void own_comm(char ret[32]) {
	int fd = open("/proc/self/comm", O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? 0 : read(fd, ret, 31);

	ret[n > 0 ? n - 1 : 0] = 0;
	for (char *c = ret; *c; ++c)
		if (*c == ' ')
			*c = '_';
	if (fd >= 0)
		(void)close(fd);
}

/* how often @function was called here before, for nth= */
static uint64_t calls_of(const char *function) {
	static struct {
		char name[64];
		uint64_t n;
	} counts[128];

	for (size_t i = 0; i < sizeof(counts) / sizeof(*counts); ++i) {
		if (!counts[i].name[0])
			(void)snprintf(counts[i].name, sizeof(counts[i].name), "%s", function);
		if (!strcmp(counts[i].name, function))
			return ++counts[i].n;
	}
	return 0;
}

/*
 * Lines of `inject`: FUNCTION then words: a number (the result), sticky=NUMBER (of this and all later calls), hang,
 * abort, kill, delay=MS; nth=N for the N-th call of a process alone, comm=NAME for processes of that name alone.
 * FUNCTION may be * for all.
 */
static CUresult inject(const char *function) {
	char text[8192], *rest = text;
	uint64_t nth = calls_of(function);
	CUresult result = 0;

	read_file("inject", text, sizeof(text));
	for (char *line; (line = strsep(&rest, "\n"));) {
		char *words = line, *name = strsep(&words, " "), *action = strsep(&words, " ");
		char comm[32];
		bool applies = true;

		if (!action || (strcmp(name, function) && strcmp(name, "*")))
			continue;
		own_comm(comm);
		for (char *word; (word = strsep(&words, " "));) {
			if (!strncmp(word, "nth=", 4))
				applies = applies && strtoull(word + 4, NULL, 10) == nth;
			else if (!strncmp(word, "comm=", 5))
				applies = applies && !strcmp(word + 5, comm);
		}
		if (!applies)
			continue;
		if (!strcmp(action, "hang"))
			for (;;)
				delay_ms(1000000);
		else if (!strcmp(action, "abort"))
			abort();
		else if (!strncmp(action, "delay=", 6))
			delay_ms(strtoull(action + 6, NULL, 10));
		else if (!strncmp(action, "sticky=", 7))
			result = fake.sticky = (CUresult)strtoul(action + 7, NULL, 10);
		else
			result = (CUresult)strtoul(action, NULL, 10);
	}
	return result;
}

void fake_begin(FakeCall *call, const char *function, unsigned int needs) {
	*call = (FakeCall){ .function = function };
	if (fake_setting_is("STUB", "1")) {
		call->result = CUDA_ERROR_STUB_LIBRARY;
		return;
	}
	call->result = inject(function);
	(void)pthread_mutex_lock(&lock);
	call->is_locked = true;
	if (call->result)
		return;
	if (fake.sticky)
		call->result = fake.sticky;
	else if (fake.initialized && fake.pid != getpid())
		call->result = CUDA_ERROR_NOT_INITIALIZED;
	else if (needs & (FAKE_INITIALIZED | FAKE_CONTEXT) && !fake.initialized)
		call->result = CUDA_ERROR_NOT_INITIALIZED;
	else if (needs & FAKE_CONTEXT && !fake_current())
		call->result = CUDA_ERROR_INVALID_CONTEXT;
}

CUresult fake_end(FakeCall *call, const char *format, ...) {
	char path[4096], line[512], comm[32];
	va_list arguments;
	int fd, n;

	if (call->is_locked)
		(void)pthread_mutex_unlock(&lock);
	own_comm(comm);
	n = snprintf(line, sizeof(line), "%d %s %s %u ", (int)getpid(), comm, call->function, call->result);
	va_start(arguments, format);
	n += vsnprintf(line + n, sizeof(line) - (size_t)n - 1, format, arguments);
	va_end(arguments);
	if (n > (int)sizeof(line) - 2)
		n = (int)sizeof(line) - 2;
	line[n++] = '\n';
	(void)snprintf(path, sizeof(path), "%s/log", directory());
	fd = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
	if (fd >= 0) {
		(void)!write(fd, line, (size_t)n);
		(void)close(fd);
	}
	return call->result;
}

/* a child that does not exec must not keep the record locked for its parent */
static void on_fork_child(void) {
	if (record_fd >= 0)
		(void)close(record_fd);
	record_fd = -1;
	(void)pthread_mutex_init(&lock, NULL);
}

static void on_fork_prepare(void) {
	(void)pthread_mutex_lock(&lock);
}

static void on_fork_parent(void) {
	(void)pthread_mutex_unlock(&lock);
}

bool fake_record_new(void) {
	static bool is_watched;
	uint64_t id = fake_random();
	struct stat st;
	char path[4096];
	FakeRecord *record;
	int fd;

	fake_path(path, "r", id);
	fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
	if (fd < 0)
		return false;
	(void)fchmod(fd, 0666);
	if (flock(fd, LOCK_EX | LOCK_NB) < 0 || ftruncate(fd, sizeof(*record)) < 0)
		goto bad;
	record = mmap(NULL, sizeof(*record), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (record == MAP_FAILED)
		goto bad;
	record->id = id;
	record->pid = getpid();
	record->euid = geteuid();
	if (stat("/proc/self/ns/pid", &st) == 0)
		record->pidns = st.st_ino;
	record_fd = fd;
	fake.record = record;
	if (!is_watched)
		(void)pthread_atfork(on_fork_prepare, on_fork_parent, on_fork_child);
	is_watched = true;
	return true;
bad:
	(void)close(fd);
	return false;
}

FakeEntry *fake_entry_add(uint64_t id, uint64_t file, uint64_t bytes, uint32_t device, bool is_own) {
	FakeRecord *record = fake.record;

	for (uint32_t i = 0; i < FAKE_ENTRIES_MAX; ++i) {
		FakeEntry *entry = &record->entries[i];

		if (entry->id)
			continue;
		*entry = (FakeEntry){ 0, file, bytes, device, is_own };
		__atomic_store_n(&entry->id, id, __ATOMIC_RELEASE);
		if (record->n_entries <= i)
			__atomic_store_n(&record->n_entries, i + 1, __ATOMIC_RELEASE);
		return entry;
	}
	return NULL;
}

void fake_entry_remove(uint64_t id) {
	for (uint32_t i = 0; i < fake.record->n_entries; ++i)
		if (fake.record->entries[i].id == id) {
			__atomic_store_n(&fake.record->entries[i].id, 0, __ATOMIC_RELEASE);
			return;
		}
}

/* Maps the record of a process; NULL when there is none. */
static FakeRecord *record_map(const char *path, bool *ret_alive) {
	struct stat st;
	FakeRecord *record = NULL;
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return NULL;
	if (fstat(fd, &st) == 0 && st.st_size == sizeof(*record)) {
		record = mmap(NULL, sizeof(*record), PROT_READ, MAP_SHARED, fd, 0);
		if (record == MAP_FAILED)
			record = NULL;
	}
	/* a shared lock, so that others who ask at the same time do not take each other for the process */
	*ret_alive = flock(fd, LOCK_SH | LOCK_NB) < 0;
	(void)close(fd);
	return record;
}

static bool record_has(const FakeRecord *record, uint64_t allocation) {
	for (uint32_t i = 0; i < __atomic_load_n(&record->n_entries, __ATOMIC_ACQUIRE); ++i)
		if (__atomic_load_n(&record->entries[i].id, __ATOMIC_ACQUIRE) == allocation)
			return true;
	return false;
}

bool fake_record_find(uint64_t id, uint64_t allocation, FakeRecord *ret_head, bool *ret_has, bool *ret_alive) {
	char path[4096];
	FakeRecord *record;

	fake_path(path, "r", id);
	record = record_map(path, ret_alive);
	if (!record)
		return false;
	memcpy(ret_head, record, offsetof(FakeRecord, entries));
	*ret_has = record_has(record, allocation);
	(void)munmap(record, sizeof(*record));
	return true;
}

/* calls @function with every record of a living process */
static void each_living(void (*function)(const FakeRecord *record, void *userdata), void *userdata) {
	DIR *dir = opendir(directory());
	struct dirent *entry;

	if (!dir)
		return;
	while ((entry = readdir(dir))) {
		char path[4096];
		FakeRecord *record;
		bool is_alive = false;

		if (strncmp(entry->d_name, "r-", 2))
			continue;
		(void)snprintf(path, sizeof(path), "%s/%s", directory(), entry->d_name);
		record = record_map(path, &is_alive);
		if (!record)
			continue;
		if (is_alive || record->id == (fake.record ? fake.record->id : 0))
			function(record, userdata);
		(void)munmap(record, sizeof(*record));
	}
	(void)closedir(dir);
}

typedef struct Usage {
	uint32_t device;
	uint64_t bytes;
	uint64_t *files; /* counted already */
	size_t n_files;
	bool has_others;
} Usage;

static void add_usage(const FakeRecord *record, void *userdata) {
	Usage *usage = userdata;

	usage->bytes += record->context_bytes[usage->device];
	if (record->contexts[usage->device] && record->id != fake.record->id)
		usage->has_others = true;
	for (uint32_t i = 0; i < record->n_entries && usage->files; ++i) {
		const FakeEntry *entry = &record->entries[i];
		bool is_known = false;

		if (!entry->id || entry->device != usage->device)
			continue;
		for (size_t k = 0; k < usage->n_files && !is_known; ++k)
			is_known = usage->files[k] == entry->file;
		if (is_known || usage->n_files == FAKE_ENTRIES_MAX)
			continue;
		usage->files[usage->n_files++] = entry->file;
		usage->bytes += entry->bytes;
	}
}

uint64_t fake_used(uint32_t device) {
	Usage usage = { .device = device, .files = calloc(FAKE_ENTRIES_MAX, sizeof(uint64_t)) };

	each_living(add_usage, &usage);
	free(usage.files);
	return usage.bytes;
}

bool fake_others_have_context(uint32_t device) {
	Usage usage = { .device = device };

	each_living(add_usage, &usage);
	return usage.has_others;
}

#define LAYOUT(_type, _size) _Static_assert(sizeof(_type) == (_size), #_type);
#define MEMBER(_type, _member, _offset) _Static_assert(offsetof(_type, _member) == (_offset), #_type "." #_member);
#include "layouts.def"
