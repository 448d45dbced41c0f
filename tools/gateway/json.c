/* SPDX-License-Identifier: Apache-2.0 */

#include <string.h>

#include "json.h"
#include "text.h"

/* The text, and where it is read; at the end a NUL is seen. */
typedef struct Reader {
	char *data;
	size_t size;
	size_t at;
	unsigned depth;
	const char *why;
	size_t offset;
} Reader;

static char peek(const Reader *reader) {
	return reader->at < reader->size ? reader->data[reader->at] : 0;
}

static bool consume(Reader *reader, char c) {
	if (peek(reader) != c || reader->at >= reader->size)
		return false;
	reader->at++;
	return true;
}

static bool wrong(Reader *reader, const char *why, size_t offset) {
	reader->why = why;
	reader->offset = offset;
	return false;
}

static void skip_blanks(Reader *reader) {
	while (reader->at < reader->size && memchr(" \t\r\n", reader->data[reader->at], 4))
		reader->at++;
}

static bool is_digit(char c) {
	return c >= '0' && c <= '9';
}

static bool check_word(Reader *reader, const char *word) {
	for (; *word; word++) {
		if (!consume(reader, *word))
			return wrong(reader, "Invalid value.", reader->at);
	}
	return true;
}

static bool read_hex4(Reader *reader, size_t begin, unsigned *ret) {
	unsigned value = 0;

	for (int i = 0; i < 4; i++, reader->at++) {
		char c = peek(reader), lower = c | 0x20;
		int digit = is_digit(c) ? c - '0' : lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;

		if (digit < 0)
			return wrong(reader, "Incorrect hex digit after \\u escape in string.", begin);
		value = value << 4 | (unsigned)digit;
	}
	*ret = value;
	return true;
}

static bool check_escape(Reader *reader) {
	size_t begin = reader->at;
	unsigned high, low;

	reader->at++;
	if (peek(reader) != 'u') {
		if (!peek(reader) || !strchr("\"\\/bfnrt", peek(reader)))
			return wrong(reader, "Invalid escape character in string.", begin);
		reader->at++;
		return true;
	}
	reader->at++;
	if (!read_hex4(reader, begin, &high))
		return false;
	if (high < 0xd800 || high > 0xdfff)
		return true;
	if (high > 0xdbff || !consume(reader, '\\') || !consume(reader, 'u'))
		return wrong(reader, "The surrogate pair in string is invalid.", begin);
	if (!read_hex4(reader, begin, &low))
		return false;
	return low >= 0xdc00 && low <= 0xdfff ? true : wrong(reader, "The surrogate pair in string is invalid.", begin);
}

static bool check_string(Reader *reader) {
	reader->at++;
	for (;;) {
		char c = peek(reader);
		size_t length;

		if (c == '"') {
			reader->at++;
			return true;
		}
		if (c == '\\') {
			if (!check_escape(reader))
				return false;
			continue;
		}
		if (!c)
			return wrong(reader, "Missing a closing quotation mark in string.", reader->at);
		length = (unsigned char)c < 0x20
				 ? 0
				 : text_utf8_length(reader->data + reader->at, reader->size - reader->at);
		if (!length)
			return wrong(reader, "Invalid encoding in string.", reader->at);
		reader->at += length;
	}
}

/*
 * json-c cuts an integer above 2^64 - 1 down to that. It has 20 digits or more: the last two become an exponent for them,
 * which makes it the same number for a double.
 */
static void make_fraction(char *digits, size_t size) {
	static const char max[] = "18446744073709551615";

	if (size < sizeof(max) - 1 || (size == sizeof(max) - 1 && memcmp(digits, max, size) <= 0))
		return;
	memcpy(digits + size - 2, "e2", 2);
}

static bool check_number(Reader *reader) {
	bool negative = consume(reader, '-'), fraction = false;
	size_t begin = reader->at;

	if (peek(reader) == 'N' || peek(reader) == 'I') {
		if (peek(reader) == 'N')
			return negative ? wrong(reader, "Invalid value.", reader->at) : check_word(reader, "NaN");
		return check_word(reader, "Infinity");
	}
	if (!is_digit(peek(reader)))
		return wrong(reader, "Invalid value.", reader->at);
	if (!consume(reader, '0')) {
		while (is_digit(peek(reader)))
			reader->at++;
	}
	if (consume(reader, '.')) {
		fraction = true;
		if (!is_digit(peek(reader)))
			return wrong(reader, "Miss fraction part in number.", reader->at);
		while (is_digit(peek(reader)))
			reader->at++;
	}
	if (peek(reader) == 'e' || peek(reader) == 'E') {
		fraction = true;
		reader->at++;
		if (peek(reader) == '+' || peek(reader) == '-')
			reader->at++;
		if (!is_digit(peek(reader)))
			return wrong(reader, "Miss exponent in number.", reader->at);
		while (is_digit(peek(reader)))
			reader->at++;
	}
	if (!fraction)
		make_fraction(reader->data + begin, reader->at - begin);
	return true;
}

static bool check_value(Reader *reader);

static bool check_object(Reader *reader) {
	reader->at++;
	skip_blanks(reader);
	if (consume(reader, '}'))
		return true;
	for (;;) {
		if (peek(reader) != '"')
			return wrong(reader, "Missing a name for object member.", reader->at);
		if (!check_string(reader))
			return false;
		skip_blanks(reader);
		if (!consume(reader, ':'))
			return wrong(reader, "Missing a colon after a name of object member.", reader->at);
		skip_blanks(reader);
		if (!check_value(reader))
			return false;
		skip_blanks(reader);
		if (consume(reader, '}'))
			return true;
		if (!consume(reader, ','))
			return wrong(reader, "Missing a comma or } after an object member.", reader->at);
		skip_blanks(reader);
	}
}

static bool check_array(Reader *reader) {
	reader->at++;
	skip_blanks(reader);
	if (consume(reader, ']'))
		return true;
	for (;;) {
		if (!check_value(reader))
			return false;
		skip_blanks(reader);
		if (consume(reader, ']'))
			return true;
		if (!consume(reader, ','))
			return wrong(reader, "Missing a comma or ] after an array element.", reader->at);
		skip_blanks(reader);
	}
}

static bool check_value(Reader *reader) {
	bool good;

	switch (peek(reader)) {
	case 'n':
		return check_word(reader, "null");
	case 't':
		return check_word(reader, "true");
	case 'f':
		return check_word(reader, "false");
	case '"':
		return check_string(reader);
	case '{':
	case '[':
		if (++reader->depth > JSON_DEPTH_MAX)
			return wrong(reader, "The document is nested too deeply.", reader->at);
		good = peek(reader) == '{' ? check_object(reader) : check_array(reader);
		reader->depth--;
		return good;
	default:
		return check_number(reader);
	}
}

bool json_check(char *data, size_t size, const char **ret_why, size_t *ret_offset) {
	Reader reader = { .data = data, .size = size };
	bool good;

	skip_blanks(&reader);
	if (!peek(&reader))
		good = wrong(&reader, "The document is empty.", reader.at);
	else
		good = check_value(&reader);
	if (good) {
		skip_blanks(&reader);
		if (reader.at < size)
			good = wrong(&reader, "The document root must not be followed by other values.", reader.at);
	}
	*ret_why = reader.why;
	*ret_offset = reader.offset;
	return good;
}

/* measured with json-c 0.16 */
size_t json_cost(const char *data, size_t size) {
	enum {
		VALUE = 80,
		ARRAY = 80,
		OBJECT = 720,
		MEMBER = 160
	};
	size_t cost = VALUE, i;
	bool is_string = false;

	for (i = 0; i < size; i++) {
		if (is_string) {
			cost++;
			if (data[i] == '\\')
				i++;
			else
				is_string = data[i] != '"';
			continue;
		}
		switch (data[i]) {
		case '"':
			is_string = true;
			break;
		case ',':
			cost += VALUE;
			break;
		case ':':
			cost += MEMBER;
			break;
		case '[':
			cost += VALUE + ARRAY;
			break;
		case '{':
			cost += VALUE + OBJECT;
			break;
		}
	}
	return cost;
}

AnswerCode json_parse(char *data, size_t size, size_t cost_max, struct json_object **ret, Answer *answer) {
	struct json_tokener *tokener;
	enum json_tokener_error error;
	const char *why;
	size_t offset;

	if (!json_check(data, size, &why, &offset))
		return answer_set(answer, ANSWER_INTERNAL, "failed to parse the request JSON buffer: %s at %zu", why,
				  offset);
	if (json_cost(data, size) > cost_max)
		return answer_set(answer, ANSWER_RESOURCE_EXHAUSTED,
				  "the JSON has more values than are held for a request");
	tokener = json_tokener_new_ex(JSON_DEPTH_MAX + 1);
	if (!tokener)
		return answer_set(answer, ANSWER_INTERNAL, "out of memory");
	*ret = json_tokener_parse_ex(tokener, data, (int)size);
	error = json_tokener_get_error(tokener);
	/* a number may go on as far as json-c knows */
	if (error == json_tokener_continue) {
		*ret = json_tokener_parse_ex(tokener, "", 1);
		error = json_tokener_get_error(tokener);
	}
	offset = json_tokener_get_parse_end(tokener);
	json_tokener_free(tokener);
	if (error != json_tokener_success)
		return answer_set(answer, ANSWER_INTERNAL,
				  "failed to parse the request JSON buffer: Unspecific syntax error. at %zu", offset);
	return ANSWER_OK;
}

bool json_member(struct json_object *object, const char *name, struct json_object **ret) {
	return json_object_is_type(object, json_type_object) && json_object_object_get_ex(object, name, ret);
}

AnswerCode json_as_string(struct json_object *object, const char **ret, size_t *ret_size, Answer *answer) {
	if (!json_object_is_type(object, json_type_string))
		return answer_set(answer, ANSWER_INTERNAL, "attempt to access JSON non-string as string");
	*ret = json_object_get_string(object);
	*ret_size = (size_t)json_object_get_string_len(object);
	return ANSWER_OK;
}

AnswerCode json_as_uint64(struct json_object *object, uint64_t *ret, Answer *answer) {
	/* json-c answers 0 for a negative one */
	if (!json_object_is_type(object, json_type_int) || (json_object_get_int64(object) < 0))
		return answer_set(answer, ANSWER_INTERNAL,
				  "attempt to access JSON non-unsigned-integer as unsigned-integer");
	*ret = json_object_get_uint64(object);
	return ANSWER_OK;
}

static AnswerCode member(struct json_object *object, const char *name, struct json_object **ret, Answer *answer) {
	if (!json_member(object, name, ret))
		return answer_set(answer, ANSWER_INTERNAL, "attempt to access non-existing object member '%s'", name);
	return ANSWER_OK;
}

AnswerCode json_member_as_string(struct json_object *object, const char *name, const char **ret, size_t *ret_size,
				 Answer *answer) {
	struct json_object *found;
	AnswerCode code = member(object, name, &found, answer);

	return code ? code : json_as_string(found, ret, ret_size, answer);
}

AnswerCode json_member_as_uint64(struct json_object *object, const char *name, uint64_t *ret, Answer *answer) {
	struct json_object *found;
	AnswerCode code = member(object, name, &found, answer);

	return code ? code : json_as_uint64(found, ret, answer);
}
