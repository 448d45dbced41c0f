/* SPDX-License-Identifier: Apache-2.0 */

#include "baseline.h"

#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

namespace {

struct Region {
	std::string name;
	void *base;
	uint64_t size;
	int32_t memory_type;
	int64_t device;
};

using Lease = std::shared_ptr<Region>;

static_assert(sizeof(Lease) <= sizeof(BaselineLease::internal), "a lease has room for a shared_ptr");
static_assert(alignof(Lease) <= alignof(uint64_t), "and is aligned for it");

} // namespace

struct BaselineName {
	std::string text;
};

struct Baseline {
	std::mutex mutex;
	std::map<std::string, Lease> regions;
	std::vector<BaselineName> names;
};

bool baseline_is_optimized() {
#ifdef __OPTIMIZE__
	return true;
#else
	return false;
#endif
}

Baseline *baseline_new(size_t n) {
	try {
		auto baseline = std::make_unique<Baseline>();

		baseline->names.reserve(n);
		return baseline.release();
	} catch (const std::bad_alloc &) {
		return nullptr;
	}
}

Baseline *baseline_free(Baseline *baseline) {
	delete baseline;
	return nullptr;
}

bool baseline_add_name(Baseline *baseline, const char *name) {
	try {
		/* they must stay where they are */
		if (baseline->names.size() == baseline->names.capacity())
			return false;
		baseline->names.push_back({ name });
		return true;
	} catch (const std::bad_alloc &) {
		return false;
	}
}

const BaselineName *baseline_name(const Baseline *baseline, size_t i) {
	return &baseline->names[i];
}

const char *baseline_name_text(const BaselineName *name) {
	return name->text.c_str();
}

bool baseline_register(Baseline *baseline, const BaselineName *name, void *base, uint64_t size) {
	try {
		auto region = std::make_shared<Region>(Region{ name->text, base, size, 0, 0 });
		std::lock_guard<std::mutex> lock(baseline->mutex);

		return baseline->regions.emplace(name->text, std::move(region)).second;
	} catch (const std::bad_alloc &) {
		return false;
	}
}

bool baseline_get_memory_info(Baseline *baseline, const BaselineName *name, uint64_t offset, uint64_t size,
			      BaselineLease *ret) {
	std::lock_guard<std::mutex> lock(baseline->mutex);
	auto found = baseline->regions.find(name->text);

	if (found == baseline->regions.end())
		return false;
	const Region &region = *found->second;
	if (offset > region.size || size > region.size - offset)
		return false;
	new (ret->internal) Lease(found->second);
	ret->address = static_cast<char *>(region.base) + offset;
	ret->memory_type = region.memory_type;
	ret->device = region.device;
	return true;
}

void baseline_release(BaselineLease *lease) {
	std::launder(reinterpret_cast<Lease *>(lease->internal))->~Lease();
}
