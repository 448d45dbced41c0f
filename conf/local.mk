# SPDX-License-Identifier: Apache-2.0

dist_man_MANS += \
	conf/shmbroker.conf.5
EXTRA_DIST += conf/shmbroker.conf conf/shmbroker-gateway.nginx

# an installed configuration belongs to the administrator: it is neither overwritten nor, once changed, removed
install_hooks += install-conf
uninstall_hooks += uninstall-conf

install-conf:
	$(MKDIR_P) "$(DESTDIR)$(confdir)"
	test -e "$(DESTDIR)$(confdir)/shmbroker.conf" || \
		$(INSTALL_DATA) $(srcdir)/conf/shmbroker.conf "$(DESTDIR)$(confdir)/shmbroker.conf"

uninstall-conf:
	if cmp -s $(srcdir)/conf/shmbroker.conf "$(DESTDIR)$(confdir)/shmbroker.conf"; then \
		rm -f "$(DESTDIR)$(confdir)/shmbroker.conf"; \
	fi
