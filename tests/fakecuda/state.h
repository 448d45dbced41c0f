/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What the processes that use the fake driver share, and what every entry point begins and ends with.
 *
 * All of it is in the directory $FAKECUDA_DIR: `settings` (KEY=VALUE a line; a process' own FAKECUDA_KEY in its
 * environment goes first), `inject` (FUNCTION ACTION a line, see fake_begin()), `log` (PID COMM FUNCTION RESULT DETAIL a
 * line), a record r-ID of each process that has called cuInit(), a file m-ID of each allocation of cuMemAlloc(). A
 * record is locked by its process for as long as that lives, so that the kernel tells when it has died.
 *
 * GPU memory is a shared mapping of files, and a device pointer is where this process has it mapped: tests may compare
 * bytes without a copy.
 *
 * One mutex guards everything of a process; fake_begin() takes it and fake_end() gives it back.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "fakecuda.h"

#define FAKE_DEVICES_MAX 8
#define FAKE_BLOCK_SIZE (UINT64_C(2) << 20)
#define FAKE_ENTRIES_MAX 8192

/* what an entry point needs; without it, it fails as the driver does */
enum {
	FAKE_ALWAYS = 0,
	FAKE_INITIALIZED = 1,
	FAKE_CONTEXT = 2, /* a current one */
};

/* an allocation or a mapping that a process keeps alive */
typedef struct FakeEntry {
	uint64_t id;	/* of the allocation; 0 while the entry is unused */
	uint64_t file;	/* of the memory behind it; several allocations are in one block */
	uint64_t bytes; /* that the file is charged with */
	uint32_t device;
	uint32_t is_own; /* allocated here, not imported */
} FakeEntry;

typedef struct FakeRecord {
	uint64_t id;
	uint64_t pidns;
	int32_t pid;
	uint32_t euid;
	uint32_t is_mps;
	uint32_t padding;
	uint32_t contexts[FAKE_DEVICES_MAX]; /* by index in the machine */
	uint64_t context_bytes[FAKE_DEVICES_MAX];
	uint32_t n_entries; /* ever used */
	FakeEntry entries[FAKE_ENTRIES_MAX];
} FakeRecord;

typedef struct FakeCall {
	const char *function;
	CUresult result;
	bool is_locked;
} FakeCall;

/* a GPU, or a MIG instance of one */
typedef struct FakeDevice {
	uint32_t index; /* in the machine */
	uint8_t uuid[16];
} FakeDevice;

struct CUctx_st {
	CUdevice device; /* ordinal here */
	uint32_t refs;	 /* of a primary context */
	bool is_primary;
	bool is_active;
	unsigned int flags;
	CUcontext next; /* of those that cuCtxCreate() made */
};

typedef struct FakeState {
	bool initialized;
	pid_t pid;
	CUresult sticky;
	FakeRecord *record;
	FakeDevice devices[FAKE_DEVICES_MAX]; /* that this process sees, by ordinal */
	int n_devices;
	struct CUctx_st primary[FAKE_DEVICES_MAX];
	CUcontext created;
} FakeState;

extern FakeState fake;

/* Locks; what goes wrong before the function itself does anything is in ->result. */
void fake_begin(FakeCall *call, const char *function, unsigned int needs);
/* Unlocks, logs and returns the result. */
CUresult fake_end(FakeCall *call, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* An entry point: @_expression is its result, and is evaluated when nothing stands against it. */
#define FAKE_ENTRY(_needs, _expression, ...)              \
	do {                                              \
		FakeCall fake_call;                       \
                                                          \
		fake_begin(&fake_call, __func__, _needs); \
		if (!fake_call.result)                    \
			fake_call.result = (_expression); \
		return fake_end(&fake_call, __VA_ARGS__); \
	} while (0)

/* The value of a setting, copied; false when there is none. */
bool fake_setting(const char *key, char *ret, size_t size);
bool fake_setting_is(const char *key, const char *value);
uint64_t fake_setting_number(const char *key, uint64_t otherwise);
/* An unverified point is answered by a switch; this is the code that a refusal has. */
CUresult fake_refusal(void);

/* "m-0123456789abcdef" in the directory, as a path */
void fake_path(char ret[4096], const char *kind, uint64_t id);
uint64_t fake_random(void);
/* Reads a GPU-… or MIG-… text. */
bool fake_parse_uuid(const char *text, uint8_t ret[16]);

/* Makes the record of this process. False when the directory is not usable. */
bool fake_record_new(void);
FakeEntry *fake_entry_add(uint64_t id, uint64_t file, uint64_t bytes, uint32_t device, bool is_own);
void fake_entry_remove(uint64_t id);
/* Copies the record of a process; @ret_alive tells whether that process still lives. False when there is none. */
bool fake_record_find(uint64_t id, uint64_t allocation, FakeRecord *ret_head, bool *ret_has, bool *ret_alive);
/* What all living processes use of a device, in bytes. */
uint64_t fake_used(uint32_t device);
/* Is there another living process with a context on this device? */
bool fake_others_have_context(uint32_t device);

/* The GPUs of the machine, whoever sees them. */
uint32_t fake_machine_devices(FakeDevice ret[FAKE_DEVICES_MAX]);
/* Is the node of this GPU in this container? */
bool fake_is_present(uint32_t index);
/* The ordinal of a GPU in this process, -1 when it is not visible. */
int fake_ordinal(uint32_t index);
/* Is memory of this GPU out of reach because it belongs to another MIG instance than this process sees? */
bool fake_is_other_instance(uint32_t index);

/* device.c: the current context, NULL for none, and its device in the machine */
CUcontext fake_current(void);
void fake_current_drop(CUcontext context);
uint32_t fake_current_index(void);

/* memory.c */
enum {
	FAKE_LEGACY,
	FAKE_MANAGED,
	FAKE_POOL,
	FAKE_IMPORTED,
	FAKE_VMM,
};

typedef struct FakeRange FakeRange;
struct FakeRange {
	FakeRange *next;
	uint8_t *map; /* of the whole file */
	size_t map_size;
	uint8_t *start;
	size_t size;
	size_t asked; /* bytes of cuMemAlloc(), which may be fewer */
	int kind;
	uint32_t device;
	uint64_t id;
	uint64_t file;
	uint64_t owner;	   /* FAKE_IMPORTED: record of the exporter */
	unsigned int refs; /* FAKE_IMPORTED */
	CUcontext context;
	CUmemGenericAllocationHandle handle; /* FAKE_VMM */
	unsigned int access;		     /* FAKE_VMM */
};

/* The range that a pointer is in, or NULL. */
FakeRange *fake_range_find(CUdeviceptr pointer);
FakeRange *fake_range_new(int kind);
void fake_range_free(FakeRange *range);
/* Is all of this one range's? */
bool fake_range_covers(CUdeviceptr pointer, size_t size);
/* vmm.c: the types of handles that the memory of a FAKE_VMM range may be exported as */
uint64_t fake_vmm_handle_types(const FakeRange *range);

/* stream.c */
void fake_streams_wait_all(void);
