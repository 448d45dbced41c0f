/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * List: an intrusive, doubly linked list; inserting cannot fail. A zeroed ListLink is not linked; a List is
 * initialised with list_init(). container_of() leads from a link to the object that embeds it.
 */

#include <stdbool.h>
#include <stddef.h>

typedef struct ListLink ListLink;

struct ListLink {
	ListLink *prev;
	ListLink *next;
};

typedef struct List {
	ListLink head;
} List;

#define container_of(_pointer, _type, _member) ((_type *)((char *)(_pointer)-offsetof(_type, _member)))

static inline void list_init(List *list) {
	list->head.prev = list->head.next = &list->head;
}

static inline bool list_is_empty(const List *list) {
	return list->head.next == &list->head;
}

static inline bool list_is_linked(const ListLink *link) {
	return link->next;
}

static inline void list_append(List *list, ListLink *link) {
	link->prev = list->head.prev;
	link->next = &list->head;
	list->head.prev->next = link;
	list->head.prev = link;
}

/* @link stands where @old stood, if that is linked */
static inline void list_replace(ListLink *old, ListLink *link) {
	*link = *old;
	if (!old->next)
		return;
	link->prev->next = link;
	link->next->prev = link;
	old->prev = old->next = NULL;
}

static inline void list_remove(ListLink *link) {
	if (!link->next)
		return;
	link->prev->next = link->next;
	link->next->prev = link->prev;
	link->prev = link->next = NULL;
}

/* the first link, or NULL */
static inline ListLink *list_first(const List *list) {
	return list_is_empty(list) ? NULL : list->head.next;
}

/* walks over links; the current one may be removed in the body */
#define list_for_each(_link, _list)                                                                       \
	for (ListLink *_link = (_list)->head.next, *_next_##_link = _link->next; _link != &(_list)->head; \
	     _link = _next_##_link, _next_##_link = _link->next)
