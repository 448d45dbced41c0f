/* SPDX-License-Identifier: Apache-2.0 */

/* Config: what is read, in which order, and what is refused with file, line and the nearest valid key. */

#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <ftw.h>
#include <grp.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config-value.h"
#include "config.h"
#include "loop.h"

#ifndef SHMBROKER_CONFDIR
#define SHMBROKER_CONFDIR "/etc/shmbroker"
#endif
#define VENDOR "/usr/lib/shmbroker"

typedef struct Tree {
	char root[64];
	char file[128]; /* for tests of one file */
	Config *config;
	char *error;
} Tree;

/* makes the directories of @path, which is below the root */
static void make_parents(const char *path) {
	char part[512];

	for (const char *at = strchr(path + 1, '/'); at; at = strchr(at + 1, '/')) {
		(void)snprintf(part, sizeof(part), "%.*s", (int)(at - path), path);
		assert_true(!mkdir(part, 0700) || errno == EEXIST);
	}
}

static void write_bytes(const char *path, const void *data, size_t size) {
	FILE *file;

	make_parents(path);
	file = fopen(path, "w");
	assert_non_null(file);
	assert_int_equal(fwrite(data, 1, size, file), size);
	assert_int_equal(fclose(file), 0);
}

static void put(Tree *tree, const char *path, const char *text) {
	char full[256];

	(void)snprintf(full, sizeof(full), "%s%s", tree->root, path);
	write_bytes(full, text, strlen(text));
}

static int load(Tree *tree, const ConfigPaths *paths) {
	tree->config = config_free(tree->config);
	free(tree->error);
	tree->error = NULL;
	return config_load(&tree->config, paths, &tree->error);
}

static int load_tree(Tree *tree) {
	return load(tree, &(ConfigPaths){ .root = tree->root });
}

static int load_text(Tree *tree, const char *text) {
	write_bytes(tree->file, text, strlen(text));
	return load(tree, &(ConfigPaths){ .file = tree->file });
}

/* @text is taken */
static void accept_text(Tree *tree, const char *text) {
	int r = load_text(tree, text);

	if (r)
		print_error("%s\n", tree->error);
	assert_int_equal(r, 0);
}

/* @text is refused, with an error that names the file and @line and contains @what */
static void refuse_text(Tree *tree, const char *text, int line, const char *what) {
	char prefix[256];

	assert_int_equal(load_text(tree, text), CONFIG_E_INVALID);
	assert_non_null(tree->error);
	(void)snprintf(prefix, sizeof(prefix), "%s:%d: ", tree->file, line);
	if (strncmp(tree->error, prefix, strlen(prefix)) || !strstr(tree->error, what))
		print_error("got \"%s\" for \"%s\"\n", tree->error, text);
	assert_int_equal(strncmp(tree->error, prefix, strlen(prefix)), 0);
	assert_non_null(strstr(tree->error, what));
}

static int setup(void **state) {
	Tree *tree = calloc(1, sizeof(*tree));
	const char *base = getenv("TMPDIR") ?: "/tmp";

	(void)snprintf(tree->root, sizeof(tree->root), "%.40s/config-XXXXXX", base);
	if (!mkdtemp(tree->root))
		return -1;
	(void)snprintf(tree->file, sizeof(tree->file), "%s/one.conf", tree->root);
	*state = tree;
	return 0;
}

static int remove_entry(const char *path, const struct stat *status, int kind, struct FTW *walk) {
	(void)status;
	(void)kind;
	(void)walk;
	return remove(path);
}

static int teardown(void **state) {
	Tree *tree = *state;

	config_free(tree->config);
	free(tree->error);
	(void)nftw(tree->root, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
	free(tree);
	return 0;
}

static void test_defaults(void **state) {
	Tree *tree = *state;

	assert_int_equal(load_tree(tree), 0);
	assert_int_equal(tree->config->loop, LOOP_AUTO);
	assert_int_equal(tree->config->sockets.n, 1);
	assert_string_equal(tree->config->sockets.items[0], "/run/shmbroker/shmbroker.sock");
	assert_int_equal(tree->config->socket_mode, 0660);
	assert_int_equal(tree->config->socket_group, CONFIG_NO_ID);
	assert_int_equal(tree->config->capacity, 65536);
	assert_false(tree->config->unsealed);
	assert_int_equal(tree->config->retire_timeout_ns, 0);
	assert_int_equal(tree->config->hello_timeout_ns, UINT64_C(10000000000));
	assert_int_equal(tree->config->unread_bytes, 4 << 20);
	assert_true(tree->config->fair_share);
	assert_true(config_id_list_is_empty(&tree->config->owner));
	assert_int_equal(tree->config->quota_bytes, CONFIG_UNLIMITED);
	assert_int_equal(tree->config->quota_sessions, 1024);
}

static void test_values(void **state) {
	Tree *tree = *state;

	accept_text(tree,
		    "# comment\n\n[broker]\n  # an indented comment\nloop = epoll\nunsealed=accept\ncapacity = 64\n"
		    "unread_bytes = 128K\nhello_timeout = 1500ms ; as an exception\nretire_timeout = 2min\n"
		    "require_allocated = yes\nsocket_mode = 0600\n[quota]\nbytes = 3G\nfds = unlimited\nmaps=7");
	assert_int_equal(tree->config->loop, LOOP_EPOLL);
	assert_true(tree->config->unsealed);
	assert_int_equal(tree->config->capacity, 64);
	assert_int_equal(tree->config->unread_bytes, 131072);
	assert_int_equal(tree->config->hello_timeout_ns, UINT64_C(1500000000));
	assert_int_equal(tree->config->retire_timeout_ns, UINT64_C(120000000000));
	assert_true(tree->config->require_allocated);
	assert_int_equal(tree->config->socket_mode, 0600);
	assert_int_equal(tree->config->quota_bytes, UINT64_C(3) << 30);
	assert_int_equal(tree->config->quota_fds, CONFIG_UNLIMITED);
	assert_int_equal(tree->config->quota_maps, 7);
	accept_text(tree, "[broker]\r\nretire_timeout = 0\r\n");
	assert_int_equal(tree->config->retire_timeout_ns, 0);
}

static void test_bad_values(void **state) {
	static const struct {
		const char *line;
		const char *what;
	} cases[] = {
		{ "loop = kqueue", "not one of: auto, io_uring, epoll" },
		{ "capacity = 63", "out of range: 64 to 1048576" },
		{ "capacity = 1048577", "out of range" },
		{ "capacity = 64K", "not a plain number" },
		{ "capacity = -1", "not a number" },
		{ "capacity =", "not a number" },
		{ "capacity = 99999999999999999999", "too large" },
		{ "unread_bytes = 4194304", "needs a unit: K, M, G" },
		{ "unread_bytes = 4k", "unknown unit" },
		{ "unread_bytes = 4MB", "unknown unit" },
		{ "unread_bytes = 1K", "out of range" },
		{ "unread_bytes = 18446744073709551615G", "too large" },
		{ "hello_timeout = 10", "needs a unit: ms, s, min" },
		{ "hello_timeout = 10h", "unknown unit" },
		{ "hello_timeout = 99999min", "out of range" },
		{ "hello_timeout = -1s", "not a number" },
		{ "socket_mode = 0888", "not a mode" },
		{ "socket_mode = 7777", "out of range" },
		{ "require_allocated = maybe", "neither yes nor no" },
		{ "unsealed = sometimes", "not one of: refuse, accept" },
		{ "socket = relative.sock", "not an absolute path" },
		{ "socket_group = no-such-group-here", "unknown group" },
		{ "unsealed_users = no-such-user-here", "unknown user" },
		{ "unsealed_users = @no-such-group-here", "unknown group" },
		{ "unsealed_users = 4294967295", "not a uid" },
	};
	Tree *tree = *state;
	char text[256];

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); ++i) {
		(void)snprintf(text, sizeof(text), "\n[broker]\n%s\nlanes = 4\n", cases[i].line);
		refuse_text(tree, text, 3, cases[i].what);
	}
	(void)snprintf(text, sizeof(text), "[broker]\nsocket = /%0120d\n", 0);
	refuse_text(tree, text, 2, "too long for a socket");
}

static void test_unknown_names(void **state) {
	Tree *tree = *state;

	refuse_text(tree, "[broker]\nlanes = 4\ncapacty = 64\n", 3,
		    "the nearest valid key is \"capacity\" in [broker]");
	refuse_text(tree, "[access]\nownr = 0\n", 2, "the nearest valid key is \"owner\" in [access]");
	/* in the wrong section: the very key is nearer than a similar one */
	refuse_text(tree, "[broker]\nadmin = 0\n", 2, "the nearest valid key is \"admin\" in [access]");
	refuse_text(tree, "\n[brokr]\nlanes = 4\n", 2, "the nearest valid one is [broker]");
	/* also without any entry, and with one that another section has */
	refuse_text(tree, "[quotas]\n", 1, "the nearest valid one is [quota]");
	refuse_text(tree, "lanes = 4\n[broker]\n", 1, "before the first [section]");
	refuse_text(tree, "[Broker]\n", 1, "unknown section");
}

static void test_bad_lines(void **state) {
	Tree *tree = *state;
	char text[512];
	const char nul[] = "[broker]\nlanes = 4\0\ncapacity = 64\n";

	refuse_text(tree, "[broker]\nlanes = 4\n  8\n", 3, "an indented line");
	refuse_text(tree, "[broker]\n\tlanes = 4\n", 2, "an indented line");
	refuse_text(tree, "[broker]\nlanes\n", 2, "neither [section] nor key = value");
	refuse_text(tree, "[broker\nlanes = 4\n", 1, "neither [section] nor key = value");
	/* the first of two errors counts, whoever found it */
	refuse_text(tree, "[broker]\nlanes\nlanes = x\n", 2, "neither [section]");
	refuse_text(tree, "[broker]\nlanes = x\nlanes\n", 2, "not a number");

	write_bytes(tree->file, nul, sizeof(nul) - 1);
	assert_int_equal(load(tree, &(ConfigPaths){ .file = tree->file }), CONFIG_E_INVALID);
	assert_non_null(strstr(tree->error, "one.conf:2: a NUL byte"));

	/* the longest line that is taken, and one byte more, with and without a newline */
	(void)snprintf(text, sizeof(text), "[broker]\nlanes = 4 ;%0*d\n",
		       (int)(CONFIG_LINE_MAX - sizeof("lanes = 4 ;")), 0);
	accept_text(tree, text);
	assert_int_equal(tree->config->lanes, 4);
	(void)snprintf(text, sizeof(text), "[broker]\nlanes = 4 ;%0*d\n",
		       (int)(CONFIG_LINE_MAX - sizeof("lanes = 4 ;") + 1), 0);
	refuse_text(tree, text, 2, "too long: 200 bytes, at most 199");
	text[strlen(text) - 1] = 0;
	accept_text(tree, text);
	(void)snprintf(text, sizeof(text), "[broker]\nlanes = 4 ;%0300d", 0);
	refuse_text(tree, text, 2, "too long");
	/* where inih would have cut, what follows must not be taken for a line of its own */
	(void)snprintf(text, sizeof(text), "#%0198d\n", 0);
	memcpy(text + 199, "[quota]", 7);
	refuse_text(tree, text, 1, "too long");
}

static void test_repeated(void **state) {
	Tree *tree = *state;

	refuse_text(tree, "[broker]\nlanes = 4\n\nlanes = 8\n", 4, "\"lanes\" is given twice");
	refuse_text(tree, "[broker]\nlanes = 4\n[quota]\nmaps = 1\n[broker]\nlanes = 4\n", 6, "given twice");
	/* the same key of another section is another one */
	accept_text(tree, "[broker]\nsessions = 64\n[quota]\nsessions = 8\n");
	assert_int_equal(tree->config->sessions, 64);
	assert_int_equal(tree->config->quota_sessions, 8);
	accept_text(tree, "[access]\nowner = 1 2\nowner = 3,@4\n");
	assert_int_equal(tree->config->owner.n_uids, 3);
	assert_int_equal(tree->config->owner.uids[2], 3);
	assert_int_equal(tree->config->owner.n_gids, 1);
	assert_int_equal(tree->config->owner.gids[0], 4);
	accept_text(tree, "[broker]\nsocket = /a\nsocket = /b c\n");
	assert_int_equal(tree->config->sockets.n, 2);
	assert_string_equal(tree->config->sockets.items[1], "/b c");
}

static void test_names_become_ids(void **state) {
	Tree *tree = *state;
	const struct passwd *user = getpwuid(0);
	const struct group *group = getgrgid(0);
	char text[256];

	assert_non_null(user);
	assert_non_null(group);
	(void)snprintf(text, sizeof(text), "[access]\nadmin = %s 1234 @%s\nreserve = team a. %s\nreserve = b/ 77\n",
		       user->pw_name, group->gr_name, user->pw_name);
	accept_text(tree, text);
	assert_int_equal(tree->config->admin.n_uids, 2);
	assert_int_equal(tree->config->admin.uids[0], 0);
	assert_int_equal(tree->config->admin.uids[1], 1234);
	assert_int_equal(tree->config->admin.n_gids, 1);
	assert_int_equal(tree->config->admin.gids[0], 0);
	assert_int_equal(tree->config->reserve.n, 2);
	assert_string_equal(tree->config->reserve.items[0].prefix, "team a.");
	assert_int_equal(tree->config->reserve.items[0].uid, 0);
	assert_string_equal(tree->config->reserve.items[1].prefix, "b/");
	assert_int_equal(tree->config->reserve.items[1].uid, 77);
	refuse_text(tree, "[access]\nreserve = prefix-only\n", 2, "not PREFIX USER");
	refuse_text(tree, "[access]\nreserve = a. no-such-user-here\n", 2, "unknown user \"no-such-user-here\"");
	refuse_text(tree, "[access]\nowner = 0 no-such-user-here\n", 2, "unknown user");
}

static void test_order(void **state) {
	Tree *tree = *state;

	put(tree, SHMBROKER_CONFDIR "/shmbroker.conf", "[broker]\nlanes = 2\ncapacity = 100\n[access]\nowner = 1\n");
	put(tree, VENDOR "/shmbroker.conf.d/20-vendor.conf",
	    "[broker]\nlanes = 3\nsessions = 33\n[access]\nowner = 2\n");
	put(tree, SHMBROKER_CONFDIR "/shmbroker.conf.d/10-first.conf", "[broker]\nlanes = 4\n");
	assert_int_equal(load_tree(tree), 0);
	/* by name over both directories: 20 comes after 10 */
	assert_int_equal(tree->config->lanes, 3);
	assert_int_equal(tree->config->capacity, 100);
	assert_int_equal(tree->config->sessions, 33);
	assert_int_equal(tree->config->owner.n_uids, 2);

	/* the administrator's file of the same name masks the vendor's */
	put(tree, SHMBROKER_CONFDIR "/shmbroker.conf.d/20-vendor.conf",
	    "[broker]\nunread_messages = 17\n[access]\nowner =\n");
	/* and these are not read at all */
	put(tree, SHMBROKER_CONFDIR "/shmbroker.conf.d/99-old.conf~", "[broker]\nnonsense\n");
	put(tree, SHMBROKER_CONFDIR "/shmbroker.conf.d/.99-hidden.conf", "[broker]\nnonsense\n");
	assert_int_equal(load_tree(tree), 0);
	assert_int_equal(tree->config->lanes, 4);
	assert_int_equal(tree->config->sessions, 16384);
	assert_int_equal(tree->config->unread_messages, 17);
	/* an empty value has emptied the list */
	assert_true(config_id_list_is_empty(&tree->config->owner));

	put(tree, SHMBROKER_CONFDIR "/shmbroker.conf.d/30-bad.conf", "[broker]\n\nlanes = four\n");
	assert_int_equal(load_tree(tree), CONFIG_E_INVALID);
	assert_non_null(strstr(tree->error, "/shmbroker.conf.d/30-bad.conf:3: lanes: \"four\""));

	/* --config is that file and nothing else */
	accept_text(tree, "[broker]\ncapacity = 70\n");
	assert_int_equal(tree->config->capacity, 70);
	assert_int_equal(tree->config->lanes, 16);
}

static void test_masked_by_null(void **state) {
	Tree *tree = *state;
	char path[256];

	put(tree, VENDOR "/shmbroker.conf.d/50-x.conf", "[broker]\nlanes = 5\n");
	assert_int_equal(load_tree(tree), 0);
	assert_int_equal(tree->config->lanes, 5);
	put(tree, SHMBROKER_CONFDIR "/shmbroker.conf.d/a.txt", "");
	(void)snprintf(path, sizeof(path), "%s%s/shmbroker.conf.d/50-x.conf", tree->root, SHMBROKER_CONFDIR);
	assert_int_equal(symlink("/dev/null", path), 0);
	assert_int_equal(load_tree(tree), 0);
	assert_int_equal(tree->config->lanes, 16);
}

static void test_bad_files(void **state) {
	Tree *tree = *state;

	assert_int_equal(load(tree, &(ConfigPaths){ .file = tree->file }), -ENOENT);
	assert_non_null(strstr(tree->error, "one.conf: No such file"));
	assert_int_equal(load(tree, &(ConfigPaths){ .file = tree->root }), CONFIG_E_INVALID);
	assert_non_null(strstr(tree->error, "not a regular file"));
	/* a FIFO that nobody writes does not stop us */
	assert_int_equal(mkfifo(tree->file, 0600), 0);
	assert_int_equal(load(tree, &(ConfigPaths){ .file = tree->file }), CONFIG_E_INVALID);
}

static void test_access_matches(void **state) {
	uint32_t uids[] = { 10, 11 }, gids[] = { 20 }, in[] = { 5, 20 }, out[] = { 5, 6 };
	IdList list = { .uids = uids, .n_uids = 2, .gids = gids, .n_gids = 1 };

	(void)state;
	assert_true(config_access_matches(&list, 11, 0, NULL, 0));
	assert_true(config_access_matches(&list, 12, 20, NULL, 0));
	assert_true(config_access_matches(&list, 12, 0, in, 2));
	assert_false(config_access_matches(&list, 12, 0, out, 2));
	/* a uid is no gid */
	assert_false(config_access_matches(&list, 20, 10, out, 2));
	assert_false(config_access_matches(&(IdList){}, 0, 0, in, 2));
}

static void test_distance(void **state) {
	(void)state;
	assert_int_equal(config_word_distance("", ""), 0);
	assert_int_equal(config_word_distance("abc", ""), 3);
	assert_int_equal(config_word_distance("lanes", "lane"), 1);
	assert_int_equal(config_word_distance("owner", "onwer"), 2);
	assert_int_equal(config_word_distance("kitten", "sitting"), 3);
}

static void test_dump(void **state) {
	char *text = NULL;
	size_t size;
	FILE *file = open_memstream(&text, &size);

	(void)state;
	config_dump_options(file);
	assert_int_equal(fclose(file), 0);
	assert_non_null(strstr(text, "broker socket_mode 0660\n"));
	assert_non_null(strstr(text, "\naccess owner\n"));
	assert_non_null(strstr(text, "\nquota bytes unlimited\n"));
	free(text);
	assert_int_equal(config_parse_loop("io_uring"), LOOP_IO_URING);
	assert_int_equal(config_parse_loop("uring"), -EINVAL);
}

#define TEST(_function) cmocka_unit_test_setup_teardown(_function, setup, teardown)

int main(void) {
	const struct CMUnitTest tests[] = {
		TEST(test_defaults),
		TEST(test_values),
		TEST(test_bad_values),
		TEST(test_unknown_names),
		TEST(test_bad_lines),
		TEST(test_repeated),
		TEST(test_names_become_ids),
		TEST(test_order),
		TEST(test_masked_by_null),
		TEST(test_bad_files),
		cmocka_unit_test(test_access_matches),
		cmocka_unit_test(test_distance),
		cmocka_unit_test(test_dump),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
