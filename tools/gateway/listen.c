/* SPDX-License-Identifier: Apache-2.0 */

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <json-c/json.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "listen.h"
#include "log.h"

#define LISTEN_BACKLOG 128

static bool is_loopback(const struct sockaddr *address) {
	if (address->sa_family == AF_INET)
		return ntohl(((const struct sockaddr_in *)address)->sin_addr.s_addr) >> 24 == 127;
	return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)address)->sin6_addr);
}

/* takes @fd over */
static int listen_add(ListenSet *set, const char *door, int fd, bool is_unix, const char *address, uint16_t port) {
	ListenSocket *socket = &set->sockets[set->n];

	if (set->n == LISTEN_MAX || strlen(address) >= sizeof(socket->address)) {
		(void)close(fd);
		return -ENOBUFS;
	}
	*socket = (ListenSocket){ .door = door, .fd = fd, .is_unix = is_unix, .port = port };
	strcpy(socket->address, address);
	set->n++;
	if (is_unix)
		log_write("%s at %s", door, address);
	else
		log_write("%s at %s, port %u", door, address, port);
	return 0;
}

static int tcp_open(const struct addrinfo *info, uint16_t *ret_port) {
	struct sockaddr_storage bound;
	socklen_t size = sizeof(bound);
	int fd, r, on = 1;

	fd = socket(info->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	/* what is accepted inherits it: the end of a reply does not wait for the client to acknowledge its beginning */
	(void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) || bind(fd, info->ai_addr, info->ai_addrlen) ||
	    listen(fd, LISTEN_BACKLOG) || getsockname(fd, (struct sockaddr *)&bound, &size)) {
		r = -errno;
		(void)close(fd);
		return r;
	}
	*ret_port = ntohs(bound.ss_family == AF_INET ? ((struct sockaddr_in *)&bound)->sin_port
						     : ((struct sockaddr_in6 *)&bound)->sin6_port);
	return fd;
}

int listen_tcp(ListenSet *set, const char *door, const char *address, uint16_t port) {
	const struct addrinfo hints = { .ai_socktype = SOCK_STREAM,
					.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE };
	const char *host = strcmp(address, "localhost") == 0 ? "127.0.0.1" : address;
	struct addrinfo *info;
	char service[8];
	int fd = -EPERM;

	(void)snprintf(service, sizeof(service), "%u", port);
	if (getaddrinfo(host, service, &hints, &info)) {
		log_write("--%s-address: \"%s\" is no address", door, address);
		return -EINVAL;
	}
	if (!is_loopback(info->ai_addr) && !set->beyond_loopback)
		log_write("--%s-address: %s is not loopback, and there is no --token-file: everybody could call", door,
			  address);
	else
		fd = tcp_open(info, &port);
	freeaddrinfo(info);
	if (fd < 0) {
		if (fd != -EPERM || set->beyond_loopback)
			log_write("%s: cannot listen at %s, port %u: %s", door, address, port, strerror(-fd));
		return fd;
	}
	return listen_add(set, door, fd, false, host, port);
}

/* whether @path may be replaced: a socket at which nobody listens */
static bool is_stale(const char *path, const struct sockaddr_un *address) {
	struct stat st;
	bool stale;
	int fd;

	if (lstat(path, &st) || !S_ISSOCK(st.st_mode))
		return false;
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return false;
	stale = connect(fd, (const struct sockaddr *)address, sizeof(*address)) && errno == ECONNREFUSED;
	(void)close(fd);
	return stale;
}

int listen_unix(ListenSet *set, const char *door, const char *path) {
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	mode_t mask;
	int fd, r;

	if (strlen(path) >= sizeof(address.sun_path)) {
		log_write("--%s-socket: the path is too long", door);
		return -ENAMETOOLONG;
	}
	strcpy(address.sun_path, path);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	if (is_stale(path, &address))
		(void)unlink(path);
	/* never reachable by more than it shall be */
	mask = umask(0777 & ~set->mode);
	r = bind(fd, (const struct sockaddr *)&address, sizeof(address)) ? -errno : 0;
	(void)umask(mask);
	if (!r && (chmod(path, set->mode) || listen(fd, LISTEN_BACKLOG))) {
		r = -errno;
		(void)unlink(path);
	}
	if (r) {
		log_write("%s: cannot listen at %s: %s", door, path, strerror(-r));
		(void)close(fd);
		return r;
	}
	return listen_add(set, door, fd, true, path, 0);
}

int listen_door(ListenSet *set, const char *door, const char *address, uint16_t port, const char *path) {
	int r;

	r = listen_tcp(set, door, address, port);
	if (!r && path[0])
		r = listen_unix(set, door, path);
	return r;
}

static int write_file(const char *path, const char *text) {
	char temporary[4096];
	size_t size = strlen(text);
	int fd, r = 0;

	if (snprintf(temporary, sizeof(temporary), "%s.%d", path, getpid()) >= (int)sizeof(temporary))
		return -ENAMETOOLONG;
	fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
	if (fd < 0)
		return -errno;
	if (write(fd, text, size) != (ssize_t)size)
		r = -EIO;
	if (close(fd) && !r)
		r = -errno;
	if (!r && rename(temporary, path))
		r = -errno;
	if (r)
		(void)unlink(temporary);
	return r;
}

int listen_write_ports(const ListenSet *set, const char *path) {
	struct json_object *all = json_object_new_object();
	int r;

	for (size_t i = 0; i < set->n; i++) {
		const ListenSocket *socket = &set->sockets[i];
		struct json_object *door;

		if (!json_object_object_get_ex(all, socket->door, &door)) {
			door = json_object_new_object();
			json_object_object_add(all, socket->door, door);
		}
		if (socket->is_unix) {
			json_object_object_add(door, "socket", json_object_new_string(socket->address));
		} else {
			json_object_object_add(door, "address", json_object_new_string(socket->address));
			json_object_object_add(door, "port", json_object_new_int(socket->port));
		}
	}
	json_object_object_add(all, "pid", json_object_new_int(getpid()));
	r = write_file(path,
		       json_object_to_json_string_ext(all, JSON_C_TO_STRING_PRETTY | JSON_C_TO_STRING_NOSLASHESCAPE));
	json_object_put(all);
	if (r)
		log_write("%s: %s", path, strerror(-r));
	return r;
}

void listen_set_deinit(ListenSet *set) {
	for (size_t i = 0; i < set->n; i++) {
		if (set->sockets[i].is_unix)
			(void)unlink(set->sockets[i].address);
		(void)close(set->sockets[i].fd);
	}
	set->n = 0;
}
