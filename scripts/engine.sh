# shellcheck shell=bash
# What the tests of images share: podman with everything it keeps in target/engine, and local stand-ins of base images, made
# of Debian's packages. No image is pulled. Root on Debian 12; what is missing is installed. To be sourced at the start, for
# the script runs itself again in mount and network namespaces of its own.
#
#   podman             runs what it runs in a network of its own, so that no port is taken and no firewall rule stays
#   online COMMAND...  with the machine's network, for builds
#   stand_in           an image by a Dockerfile on its standard input, unless it is there from the time before

engine=$PWD/target/engine

if [ -z "${ENGINE_OUTSIDE:-}" ]; then
  missing=()
  need() { command -v "$1" >/dev/null || missing+=("$2"); }
  need debootstrap debootstrap
  need podman podman
  need crun crun
  need curl curl
  need iptables iptables
  need ip iproute2
  [ -e /usr/lib/podman/netavark ] || missing+=(netavark)
  [ -e /usr/lib/podman/aardvark-dns ] || missing+=(aardvark-dns)
  [[ $0 != *compose* ]] || need podman-compose podman-compose
  [ ${#missing[@]} = 0 ] || { apt-get -qq update; DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null; }
  ENGINE_OUTSIDE=/proc/$$/ns/net
  export ENGINE_OUTSIDE
  # Not `exec`: this process keeps the network of the machine for the builds.
  unshare --mount --net --propagation private -- "$0" "$@"
  exit
fi

# crun takes cgroup v1 or v2, but not both at once.
[ ! -d /sys/fs/cgroup/unified ] || umount /sys/fs/cgroup/unified
ip link set lo up
mkdir -p "$engine" /run/netns
mount -t tmpfs tmpfs /run/netns
cat >"$engine/storage.conf" <<EOF
[storage]
driver = "${ENGINE_STORAGE:-overlay}"
graphroot = "$engine/images"
runroot = "$engine/run"
EOF
# Limits stay as they are: without CAP_SYS_RESOURCE nobody raises them.
cat >"$engine/containers.conf" <<EOF
[containers]
default_ulimits = []
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
tmp_dir = "$engine/run/libpod"
volume_path = "$engine/volumes"
[network]
network_backend = "netavark"
network_config_dir = "$engine/networks"
EOF
: >"$engine/registries.conf"
export CONTAINERS_STORAGE_CONF=$engine/storage.conf CONTAINERS_CONF=$engine/containers.conf CONTAINERS_REGISTRIES_CONF=$engine/registries.conf
# There may be no systemd to time health checks by; the tests ask for them themselves.
export DISABLE_HC_SYSTEMD=true

step() { echo "::: $*"; }
fail() { echo "FAILED: $*" >&2; exit 1; }
online() { nsenter --net="$ENGINE_OUTSIDE" "$@"; }

stand_in() { # IMAGE OPTION...
  local image=$1
  shift
  podman image exists "$image" || online podman build --quiet --network host --tag "$image" "$@" --file - "$engine/empty" >/dev/null || fail "stand-in of $image"
}

# Debian 12, of which the other ones are made.
debian=localhost/debian:bookworm-slim
mkdir -p "$engine/empty"
if ! podman image exists $debian; then
  step "stand-in of Debian by debootstrap"
  mirror=$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/*.sources 2>/dev/null | head -1)
  rm -rf "$engine/debian"
  online debootstrap --variant=minbase bookworm "$engine/debian" "$mirror" >"$engine/debian.log" ||
    { tail "$engine/debian.log" >&2; exit 1; }
  tar -C "$engine/debian" --exclude='./var/cache/apt/archives/*.deb' -c . | podman import --quiet - $debian >/dev/null
  rm -rf "$engine/debian"
fi

# The toolchain of this machine, as the official image of Rust places it.
stand_in_rust() { # VERSION
  local toolchain
  toolchain=$(rustc "+$1" --print sysroot 2>/dev/null || rustc --print sysroot)
  "$toolchain/bin/rustc" --version | grep -q " $1 " || fail "Rust $1 is not installed"
  stand_in "localhost/rust:$1-bookworm" --volume "$toolchain:/toolchain:ro" --volume /etc/ssl/certs:/certificates:ro <<EOF
FROM $debian
ENV CARGO_HOME=/usr/local/cargo PATH=/usr/local/cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
RUN apt-get -qq update && apt-get -qq install -y --no-install-recommends gcc libc6-dev ca-certificates >/dev/null \\
 && cp /certificates/ca-certificates.crt /etc/ssl/certs/ \\
 && mkdir -p /usr/local/cargo/bin /usr/local/cargo/lib/rustlib \\
 && cp -P /toolchain/bin/cargo /toolchain/bin/rustc /usr/local/cargo/bin/ \\
 && cp -P /toolchain/lib/*.so* /usr/local/cargo/lib/ \\
 && cp -rP /toolchain/lib/rustlib/*-linux-gnu /usr/local/cargo/lib/rustlib/
EOF
}

# The packages of which the distroless image `cc-debian12` is made, and its user.
stand_in_distroless() { # IMAGE
  stand_in "$1" <<EOF
FROM $debian AS packages
RUN apt-get -qq update && apt-get -qq install -y --no-install-recommends ca-certificates >/dev/null \\
 && mkdir -p /tmp/debs /image/tmp /image/root /image/home/nonroot && cd /tmp/debs && chmod 1777 . /image/tmp \\
 && apt-get -qq download base-files netbase tzdata media-types libc6 libssl3 libgcc-s1 gcc-12-base libgomp1 libstdc++6 >/dev/null \\
 && for deb in *.deb; do dpkg-deb --extract "\$deb" /image; done \\
 && install -D -m 0644 /etc/ssl/certs/ca-certificates.crt /image/etc/ssl/certs/ca-certificates.crt \\
 && rm -rf /image/usr/share/man /image/usr/share/lintian \\
 && chown 65532:65532 /image/home/nonroot \\
 && printf 'root:x:0:0:root:/root:/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin\n' >/image/etc/passwd \\
 && printf 'root:x:0:\nnobody:x:65534:\nnonroot:x:65532:\n' >/image/etc/group
FROM scratch
COPY --from=packages /image/ /
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
USER 65532
WORKDIR /home/nonroot
EOF
}

# Stand-ins of what the project's Dockerfile begins with.
base=$(sed -n 's/^ARG BASE=//p' Dockerfile)
stand_in_bases() {
  stand_in_rust "$(sed -n 's/^ARG RUST=//p' Dockerfile)"
  stand_in_distroless "$base"
}
# For its build: crates that this machine has needn't be downloaded again.
build_options=(--network host --format docker)
crates=${CARGO_HOME:-$HOME/.cargo}/registry
[ ! -d "$crates" ] || build_options+=(--volume "$crates:/usr/local/cargo/registry:O")
