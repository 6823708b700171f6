#!/usr/bin/env bash
# Builds the image of deploy/container and starts its programs. If this machine cannot do so, prints the reason and
# exits with status 77.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/../.."
file=deploy/container/Containerfile
image=riser-xtask

skip() {
    echo "$*"
    exit 77
}

# The engines have the same arguments.
engine=
for name in docker podman; do
    if "$name" info >/dev/null 2>&1; then engine=$name; fi
done
[ -n "$engine" ] || skip "no usable container engine: tried podman, docker"

for base in $(sed -n 's/^FROM \([^ ]*\).*/\1/p' "$file"); do
    # We pull the base images separately: a missing network should not be reported as a failure, but a failed build
    # should.
    if ! "$engine" image inspect "$base" >/dev/null 2>&1; then
        said=$("$engine" pull --quiet "$base" 2>&1) ||
            skip "$engine cannot pull the base image $base: ${said##*$'\n'}"
    fi
    # If we run in a container, the engine may support everything but this.
    said=$("$engine" run --rm --network none "$base" true 2>&1) ||
        skip "$engine cannot run a container: ${said##*$'\n'}"
done
"$engine" build --tag "$image" --file "$file" . >&2

# The programs start, read the default configuration and find the libraries to be used by other programs.
in_image() {
    "$engine" run --rm --network none "$image" "$@"
}
for program in riserd riser riserd-configfs riser-sa riser-iwpmd; do
    in_image "$program" --version
done
in_image riserd check /etc/riser/riserd.yaml
in_image riser run -- true
