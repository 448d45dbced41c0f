# SPDX-License-Identifier: Apache-2.0

EXTRA_DIST += \
	systemd/shmbroker-gateway.service.in \
	systemd/shmbroker-sysusers.conf \
	systemd/shmbroker.service.in \
	systemd/shmbroker.socket

if WITH_SYSTEMD
systemdsystemunit_DATA = \
	systemd/shmbroker.service \
	systemd/shmbroker.socket

if WITH_GATEWAY
systemdsystemunit_DATA += \
	systemd/shmbroker-gateway.service
endif

# systemd-sysusers reads names that end in .conf; the file is installed as shmbroker.conf
install_hooks += install-sysusers
uninstall_hooks += uninstall-sysusers
endif

install-sysusers:
	$(MKDIR_P) "$(DESTDIR)$(sysusersdir)"
	$(INSTALL_DATA) $(srcdir)/systemd/shmbroker-sysusers.conf "$(DESTDIR)$(sysusersdir)/shmbroker.conf"

uninstall-sysusers:
	rm -f "$(DESTDIR)$(sysusersdir)/shmbroker.conf"

systemd/shmbroker.service: systemd/shmbroker.service.in Makefile
	$(AM_V_GEN)$(MKDIR_P) systemd && $(SED) -e 's|@sbindir[@]|$(sbindir)|g' $(srcdir)/systemd/shmbroker.service.in >$@.tmp && mv $@.tmp $@

systemd/shmbroker-gateway.service: systemd/shmbroker-gateway.service.in Makefile
	$(AM_V_GEN)$(MKDIR_P) systemd && $(SED) -e 's|@sbindir[@]|$(sbindir)|g' $(srcdir)/systemd/shmbroker-gateway.service.in >$@.tmp && mv $@.tmp $@

CLEANFILES += systemd/shmbroker-gateway.service systemd/shmbroker.service
