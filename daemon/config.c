/* SPDX-License-Identifier: Apache-2.0 */

#include "config.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ini.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "config-value.h"
#include "cuda/cuda.h"
#include "loop.h"
#include "spin.h"
#include "wire/fd.h"

#ifndef SHMBROKER_CONFDIR
#define SHMBROKER_CONFDIR "/etc/shmbroker"
#endif
#define VENDOR_DIRECTORY "/usr/lib/shmbroker"
#define DROP_INS "shmbroker.conf.d"

typedef enum OptionType {
	TYPE_BOOL,
	TYPE_COUNT,
	TYPE_COUNT_QUOTA,
	TYPE_SIZE,
	TYPE_SIZE_QUOTA,
	TYPE_DURATION,
	TYPE_MODE,
	TYPE_GROUP,
	TYPE_LOOP,
	TYPE_SPIN,
	TYPE_UNSEALED,
	TYPE_CUDA,
	TYPE_TEXT,
	TYPE_PATHS,
	TYPE_IDS,
	TYPE_RESERVE,
} OptionType;

typedef struct Option {
	const char *section;
	const char *key;
	const char *value; /* the default */
	OptionType type;
	bool list;
	uint64_t min;
	uint64_t max;
	size_t offset; /* of the field in Config */
} Option;

static const Option options[] = {
#define OPTION(_section, _key, _type, _field, _default, _list, _min, _max, _meaning) \
	{ #_section, #_key, _default, TYPE_##_type, _list, _min, _max, offsetof(Config, _field) },
#include "options.def"
#undef OPTION
};

#define N_OPTIONS (sizeof(options) / sizeof(*options))

typedef struct Loader {
	Config *config;
	bool given[N_OPTIONS]; /* by any file so far: then the default does not count */
	char *error;
	int r; /* what config_load() returns */
} Loader;

/* one file, while it is read */
typedef struct Parser {
	Loader *loader;
	const char *path;
	FILE *file;
	int line;
	int error_line; /* of what we found ourselves */
	char *buffer;
	size_t capacity;
	bool seen[N_OPTIONS];
} Parser;

typedef struct DropIn {
	char *path;
	const char *name; /* its last part */
	bool vendor;
} DropIn;

typedef struct DropIns {
	DropIn *items;
	size_t n;
} DropIns;

static const char *const loop_words[] = { "auto", "io_uring", "epoll" };
static const int loop_kinds[] = { LOOP_AUTO, LOOP_IO_URING, LOOP_EPOLL };
static const char *const spin_words[] = { [SPIN_AUTO] = "auto", [SPIN_NO] = "no", [SPIN_YES] = "yes" };
static const char *const unsealed_words[] = { "refuse", "accept" };
static const char *const cuda_words[] = { [CUDA_AUTO] = "auto",
					  [CUDA_OFF] = "off",
					  [CUDA_RELAY] = "relay",
					  [CUDA_VALIDATE] = "validate",
					  [CUDA_HOLD] = "hold" };

/* ---- values ---- */

static int store_number(const Option *option, void *field, const char *text, char *why) {
	bool quota = option->type == TYPE_COUNT_QUOTA || option->type == TYPE_SIZE_QUOTA;
	uint64_t value;
	int r = 0;

	if (quota && !strcmp(text, "unlimited"))
		value = CONFIG_UNLIMITED;
	else if (option->type == TYPE_COUNT || option->type == TYPE_COUNT_QUOTA)
		r = config_value_count(text, option->min, option->max, &value, why);
	else if (option->type == TYPE_DURATION)
		r = config_value_duration(text, option->min, option->max, &value, why);
	else
		r = config_value_size(text, option->min, option->max, &value, why);
	if (r)
		return r;
	if (option->type == TYPE_COUNT)
		*(uint32_t *)field = (uint32_t)value;
	else
		*(uint64_t *)field = value;
	return 0;
}

/* puts @text into the field of @option; an empty text empties a list */
static int store(const Option *option, Config *config, const char *text, char *why) {
	void *field = (char *)config + option->offset;
	size_t word;
	int r;

	switch (option->type) {
	case TYPE_BOOL:
		return config_value_bool(text, field, why);
	case TYPE_COUNT:
	case TYPE_COUNT_QUOTA:
	case TYPE_SIZE:
	case TYPE_SIZE_QUOTA:
	case TYPE_DURATION:
		return store_number(option, field, text, why);
	case TYPE_MODE:
		return config_value_mode(text, (uint32_t)option->max, field, why);
	case TYPE_GROUP:
		return config_value_group(text, field, why);
	case TYPE_LOOP:
		r = config_value_word(text, loop_words, 3, &word, why);
		if (!r)
			*(int *)field = loop_kinds[word];
		return r;
	case TYPE_SPIN:
		r = config_value_word(text, spin_words, 3, &word, why);
		if (!r)
			*(int *)field = (int)word;
		return r;
	case TYPE_UNSEALED:
		r = config_value_word(text, unsealed_words, 2, &word, why);
		if (!r)
			*(bool *)field = word;
		return r;
	case TYPE_CUDA:
		r = config_value_word(text, cuda_words, 5, &word, why);
		if (!r)
			*(int *)field = (int)word;
		return r;
	case TYPE_TEXT:
		return config_value_text(text, field);
	case TYPE_PATHS:
		if (*text)
			return config_value_path(text, field, why);
		string_list_clear(field);
		return 0;
	case TYPE_IDS:
		if (*text)
			return config_value_ids(text, field, why);
		id_list_clear(field);
		return 0;
	case TYPE_RESERVE:
		if (*text)
			return config_value_reserve(text, field, why);
		reservation_list_clear(field);
		return 0;
	}
	return -EINVAL;
}

/* ---- lines ---- */

/* the first error counts */
__attribute__((__format__(__printf__, 3, 4))) static int refuse(Loader *loader, int r, const char *format, ...) {
	va_list arguments;

	if (loader->r)
		return loader->r;
	loader->r = r;
	va_start(arguments, format);
	if (vasprintf(&loader->error, format, arguments) < 0)
		loader->error = NULL;
	va_end(arguments);
	return r;
}

static bool section_exists(const char *section) {
	for (size_t i = 0; i < N_OPTIONS; ++i)
		if (!strcmp(options[i].section, section))
			return true;
	return false;
}

static const char *nearest_section(const char *section) {
	const Option *nearest = options;

	for (size_t i = 0; i < N_OPTIONS; ++i)
		if (config_word_distance(section, options[i].section) < config_word_distance(section, nearest->section))
			nearest = &options[i];
	return nearest->section;
}

/* the most similar key of @section, unless another section has that very key */
static const Option *nearest_option(const char *section, const char *key) {
	const Option *nearest = NULL;

	for (size_t i = 0; i < N_OPTIONS; ++i)
		if (!strcmp(options[i].key, key))
			return &options[i];
	for (size_t i = 0; i < N_OPTIONS; ++i)
		if (!strcmp(options[i].section, section) &&
		    (!nearest || config_word_distance(key, options[i].key) < config_word_distance(key, nearest->key)))
			nearest = &options[i];
	return nearest;
}

static const Option *find_option(const char *section, const char *key) {
	for (size_t i = 0; i < N_OPTIONS; ++i)
		if (!strcmp(options[i].section, section) && !strcmp(options[i].key, key))
			return &options[i];
	return NULL;
}

static int refuse_section(Parser *parser, const char *section) {
	return refuse(parser->loader, CONFIG_E_INVALID, "%s:%d: unknown section [%s]; the nearest valid one is [%s]",
		      parser->path, parser->line, section, nearest_section(section));
}

static int refuse_key(Parser *parser, const char *section, const char *key) {
	const Option *nearest = nearest_option(section, key);

	return refuse(parser->loader, CONFIG_E_INVALID,
		      "%s:%d: unknown key \"%s\" in [%s]; the nearest valid key is \"%s\" in [%s]", parser->path,
		      parser->line, key, section, nearest->key, nearest->section);
}

static int parse_entry(Parser *parser, const char *section, const char *key, const char *value) {
	Loader *loader = parser->loader;
	const Option *option = find_option(section, key);
	char why[CONFIG_WHY_MAX];
	size_t i;
	int r;

	if (!*section)
		return refuse(loader, CONFIG_E_INVALID, "%s:%d: \"%s\" before the first [section]", parser->path,
			      parser->line, key);
	if (!section_exists(section))
		return refuse_section(parser, section);
	if (!option)
		return refuse_key(parser, section, key);
	i = (size_t)(option - options);
	if (parser->seen[i] && !option->list)
		return refuse(loader, CONFIG_E_INVALID, "%s:%d: \"%s\" is given twice in this file, and it is no list",
			      parser->path, parser->line, key);
	r = store(option, loader->config, value, why);
	if (r == CONFIG_E_INVALID)
		return refuse(loader, r, "%s:%d: %s: %s", parser->path, parser->line, key, why);
	if (r)
		return refuse(loader, r, "%s:%d: %s", parser->path, parser->line, strerror(-r));
	parser->seen[i] = true;
	/* an emptied list has its default again */
	loader->given[i] = !option->list || *value;
	return 0;
}

/* what inih calls for each entry; it wants 0 for an error, and goes on reading until its reader has no more */
static int on_entry(void *userdata, const char *section, const char *key, const char *value) {
	Parser *parser = userdata;

	if (parser->loader->r)
		return 0;
	if (!parse_entry(parser, section, key, value))
		return 1;
	parser->error_line = parser->line;
	return 0;
}

/* what inih would misunderstand, or not tell us */
static int check_line(Parser *parser, const char *line, size_t length, size_t max) {
	Loader *loader = parser->loader;
	size_t blanks = strspn(line, " \t\v\f\r");

	if (strlen(line) != length)
		return refuse(loader, CONFIG_E_INVALID, "%s:%d: a NUL byte", parser->path, parser->line);
	if (length > max)
		return refuse(loader, CONFIG_E_INVALID, "%s:%d: the line is too long: %zu bytes, at most %zu",
			      parser->path, parser->line, length, max);
	/* inih takes it for another value of the key before */
	if (blanks && !strchr("\n#;", line[blanks]))
		return refuse(loader, CONFIG_E_INVALID, "%s:%d: an indented line", parser->path, parser->line);
	/* inih says nothing about sections without entries */
	if (*line == '[') {
		_cleanup_(freep) char *section = strndup(line + 1, strcspn(line + 1, "]\n"));

		if (!section)
			return refuse(loader, -ENOMEM, "%s:%d: %s", parser->path, parser->line, strerror(ENOMEM));
		if (line[1 + strlen(section)] == ']' && !section_exists(section))
			return refuse_section(parser, section);
	}
	return 0;
}

/* the reader of inih, which has room for @size bytes: like fgets(), but a line that does not fit is an error */
static char *read_line(char *buffer, int size, void *userdata) {
	Parser *parser = userdata;
	size_t max = (size_t)size - 1 < CONFIG_LINE_MAX ? (size_t)size - 1 : CONFIG_LINE_MAX;
	ssize_t length;

	if (parser->loader->r)
		return NULL;
	errno = 0;
	length = getline(&parser->buffer, &parser->capacity, parser->file);
	if (length < 0) {
		if (!feof(parser->file))
			(void)refuse(parser->loader, errno ? -errno : -EIO, "%s: %s", parser->path,
				     strerror(errno ?: EIO));
		return NULL;
	}
	parser->line++;
	if (check_line(parser, parser->buffer, (size_t)length, max)) {
		parser->error_line = parser->line;
		return NULL;
	}
	memcpy(buffer, parser->buffer, (size_t)length + 1);
	return buffer;
}

/* ---- files ---- */

static void closefilep(FILE **file) {
	if (*file)
		(void)fclose(*file);
}

static int parse_file(Loader *loader, const char *path, bool optional) {
	_cleanup_(closep) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	_cleanup_(closefilep) FILE *file = NULL;
	Parser parser = { .loader = loader, .path = path };
	struct stat status;
	int r;

	if (fd < 0 && errno == ENOENT && optional)
		return 0;
	if (fd < 0 || fstat(fd, &status))
		return refuse(loader, -errno, "%s: %s", path, strerror(errno));
	/* a link to a null device stands for an empty file */
	if (!S_ISREG(status.st_mode) && !S_ISCHR(status.st_mode))
		return refuse(loader, CONFIG_E_INVALID, "%s: not a regular file", path);
	file = fdopen(fd, "r");
	if (!file)
		return refuse(loader, -errno, "%s: %s", path, strerror(errno));
	(void)steal_fd(&fd);

	parser.file = file;
	r = ini_parse_stream(read_line, &parser, on_entry, &parser);
	free(parser.buffer);
	/* what inih itself did not understand, if that comes first */
	if (r > 0 && (!loader->r || r < parser.error_line)) {
		free(steal_ptr(loader->error));
		loader->r = 0;
		return refuse(loader, CONFIG_E_INVALID, "%s:%d: neither [section] nor key = value", path, r);
	}
	return loader->r;
}

static void drop_ins_deinit(DropIns *drop_ins) {
	for (size_t i = 0; i < drop_ins->n; ++i)
		free(drop_ins->items[i].path);
	free(drop_ins->items);
}

static int drop_in_compare(const void *a, const void *b) {
	const DropIn *left = a, *right = b;

	return strcmp(left->name, right->name) ?: left->vendor - right->vendor;
}

static int drop_ins_append(DropIns *drop_ins, const char *directory, const char *name, bool vendor) {
	DropIn *grown = reallocarray(drop_ins->items, drop_ins->n + 1, sizeof(*grown));
	char *path;

	if (!grown)
		return -ENOMEM;
	drop_ins->items = grown;
	if (asprintf(&path, "%s/%s", directory, name) < 0)
		return -ENOMEM;
	grown[drop_ins->n++] = (DropIn){ .path = path, .name = strrchr(path, '/') + 1, .vendor = vendor };
	return 0;
}

static bool is_drop_in(const char *name) {
	size_t length = strlen(name);

	return *name != '.' && length > strlen(".conf") && !strcmp(name + length - strlen(".conf"), ".conf");
}

static int drop_ins_read(DropIns *drop_ins, Loader *loader, const char *directory, bool vendor) {
	DIR *stream = opendir(directory);
	struct dirent *entry;
	int r = 0;

	if (!stream)
		return errno == ENOENT ? 0 : refuse(loader, -errno, "%s: %s", directory, strerror(errno));
	while (!r && (errno = 0, entry = readdir(stream)))
		if (is_drop_in(entry->d_name))
			r = drop_ins_append(drop_ins, directory, entry->d_name, vendor);
	if (!r)
		r = -errno;
	(void)closedir(stream);
	return r ? refuse(loader, r, "%s: %s", directory, strerror(-r)) : 0;
}

static int load_tree(Loader *loader, const char *root) {
	_cleanup_(drop_ins_deinit) DropIns drop_ins = {};
	_cleanup_(freep) char *file = NULL, *administrator = NULL, *vendor = NULL;
	int r;

	if (asprintf(&file, "%s" SHMBROKER_CONFDIR "/shmbroker.conf", root) < 0 ||
	    asprintf(&administrator, "%s" SHMBROKER_CONFDIR "/" DROP_INS, root) < 0 ||
	    asprintf(&vendor, "%s" VENDOR_DIRECTORY "/" DROP_INS, root) < 0)
		return refuse(loader, -ENOMEM, "%s", strerror(ENOMEM));
	r = parse_file(loader, file, true);
	if (r)
		return r;
	r = drop_ins_read(&drop_ins, loader, vendor, true);
	if (r)
		return r;
	r = drop_ins_read(&drop_ins, loader, administrator, false);
	if (r)
		return r;
	if (drop_ins.n)
		qsort(drop_ins.items, drop_ins.n, sizeof(*drop_ins.items), drop_in_compare);
	for (size_t i = 0; i < drop_ins.n; ++i) {
		/* the administrator's comes first and masks the vendor's */
		if (i && !strcmp(drop_ins.items[i].name, drop_ins.items[i - 1].name))
			continue;
		r = parse_file(loader, drop_ins.items[i].path, false);
		if (r)
			return r;
	}
	return 0;
}

static int apply_defaults(Loader *loader) {
	char why[CONFIG_WHY_MAX] = "";

	for (size_t i = 0; i < N_OPTIONS; ++i) {
		int r = loader->given[i] ? 0 : store(&options[i], loader->config, options[i].value, why);

		if (r)
			return refuse(loader, r, "default of %s: %s", options[i].key, r < 0 ? strerror(-r) : why);
	}
	return 0;
}

int config_load(Config **ret, const ConfigPaths *paths, char **ret_error) {
	Loader loader = { .config = calloc(1, sizeof(Config)) };

	if (!loader.config)
		(void)refuse(&loader, -ENOMEM, "%s", strerror(ENOMEM));
	else if (paths->file)
		(void)parse_file(&loader, paths->file, false);
	else
		(void)load_tree(&loader, paths->root ?: "");
	if (!loader.r)
		(void)apply_defaults(&loader);
	if (loader.r) {
		config_free(loader.config);
		*ret_error = loader.error;
		return loader.r;
	}
	*ret = loader.config;
	return 0;
}

Config *config_free(Config *config) {
	if (!config)
		return NULL;
	for (size_t i = 0; i < N_OPTIONS; ++i) {
		void *field = (char *)config + options[i].offset;

		if (options[i].type == TYPE_PATHS)
			string_list_clear(field);
		else if (options[i].type == TYPE_TEXT)
			free(*(char **)field);
		else if (options[i].type == TYPE_IDS)
			id_list_clear(field);
		else if (options[i].type == TYPE_RESERVE)
			reservation_list_clear(field);
	}
	free(config);
	return NULL;
}

/* ---- what it says ---- */

bool config_access_matches(const IdList *list, uint32_t uid, uint32_t gid, const uint32_t *groups, size_t n_groups) {
	for (size_t i = 0; i < list->n_uids; ++i)
		if (list->uids[i] == uid)
			return true;
	for (size_t i = 0; i < list->n_gids; ++i) {
		if (list->gids[i] == gid)
			return true;
		for (size_t j = 0; j < n_groups; ++j)
			if (list->gids[i] == groups[j])
				return true;
	}
	return false;
}

int config_parse_loop(const char *text) {
	char why[CONFIG_WHY_MAX];
	size_t word;

	return config_value_word(text, loop_words, 3, &word, why) ? -EINVAL : loop_kinds[word];
}

void config_dump_options(FILE *file) {
	for (size_t i = 0; i < N_OPTIONS; ++i)
		(void)fprintf(file, "%s %s%s%s\n", options[i].section, options[i].key, *options[i].value ? " " : "",
			      options[i].value);
}
