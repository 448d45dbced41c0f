/* SPDX-License-Identifier: Apache-2.0 */

#include <getopt.h>

#include "options.h"
#include "output.h"

static const Column columns[] = {
	{ "session", COLUMN_NUMBER, false }, { "uid", COLUMN_NUMBER, false },
	{ "pid", COLUMN_NUMBER, false },     { "gid", COLUMN_NUMBER, true },
	{ "comm", COLUMN_TEXT, false },	     { "container", COLUMN_TEXT, false },
	{ "age", COLUMN_DURATION, false },   { "roles", COLUMN_WORDS, false },
	{ "rights", COLUMN_WORDS, true },    { "regions", COLUMN_NUMBER, false },
	{ "bytes", COLUMN_BYTES, false },    { "maps", COLUMN_NUMBER, false },
	{ "leases", COLUMN_NUMBER, false },  { "unread", COLUMN_NUMBER, true },
	{ "flags", COLUMN_WORDS, false },    {},
};

static const Option options[] = {
	OPTIONS_TABLE,
	{},
};

static int on_client(void *userdata, const struct shmb_client_status *client) {
	static const char *const roles[] = { "owner", "consumer", "admin" };
	static const char *const rights[] = { "keep", "delegate" };
	static const char *const flags[] = { "attached", "detached", "away" };
	json_object *row = row_new();

	row_number(row, "session", client->session);
	row_identity(row, client->pid, client->uid);
	row_number(row, "gid", client->gid);
	row_text(row, "comm", client->comm);
	row_text(row, "container", client->container && client->container[0] ? client->container : NULL);
	row_number(row, "age", client->age_ns);
	row_words(row, "roles", client->roles, roles, ARRAY_N(roles));
	row_words(row, "rights", client->rights, rights, ARRAY_N(rights));
	row_number(row, "regions", client->regions);
	row_number(row, "bytes", client->bytes);
	row_number(row, "maps", client->maps);
	row_number(row, "leases", client->leases);
	row_number(row, "unread", client->unread);
	row_words(row, "flags", client->flags, flags, ARRAY_N(flags));
	table_add(userdata, row);
	return 0;
}

static int show(Ctl *ctl, Table *table) {
	json_object *document;
	int r;

	r = shmb_client_each_client(ctl->client, on_client, table);
	if (r)
		return ctl_fail(r, "the clients cannot be listed");
	table_sort(table);
	if (!ctl->json) {
		table_print(table, 0);
		return 0;
	}
	document = row_new();
	row_object(document, "clients", json_object_get(table->rows));
	json_print(document);
	json_object_put(document);
	return 0;
}

static int run(Ctl *ctl) {
	Table table;
	int id, r = 0;

	table_init(&table, columns, "session");
	while (!r && (id = options_next(ctl)) != OPTION_END)
		r = table_option(&table, id, optarg);
	if (!r && ctl->argv[optind])
		r = ctl_usage("takes no argument \"%s\"", ctl->argv[optind]);
	if (!r)
		r = ctl_connect(ctl, SHMB_NO_LEASE_PAGE);
	if (!r)
		r = show(ctl, &table);
	table_deinit(&table);
	return r;
}

const Verb verb_clients = {
	.name = "clients",
	.arguments = "",
	.help = "lists the sessions, with what they own and hold",
	.options = options,
	.columns = columns,
	.run = run,
};
