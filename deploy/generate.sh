#!/usr/bin/env bash
# Generates the manual pages, completions and the schema of the package: generate.sh PROGRAMS. They are written by the
# programs in this directory, so they can never be from another version, to its subdirectory `package`.
set -euo pipefail
programs=$1
files=$programs/package
# We must not package a page of a command that has been removed.
rm -rf "$files"
mkdir -p "$files/man" "$files"/completions/{bash,zsh,fish}
for program in riserd riser riserd-configfs riser-sa riser-iwpmd; do
    "$programs/$program" man --dir "$files/man"
done
for program in riserd riser riserd-configfs; do
    "$programs/$program" completions bash >"$files/completions/bash/$program"
    "$programs/$program" completions zsh >"$files/completions/zsh/_$program"
    "$programs/$program" completions fish >"$files/completions/fish/$program.fish"
done
gzip -9n "$files"/man/*
for page in "$files"/man/*.gz; do
    # `man` searches for a page in the directory for its section.
    section=${page%.gz}
    section=${section##*.}
    mkdir -p "$files/man/man$section"
    mv "$page" "$files/man/man$section"
done
"$programs/riserd" schema >"$files/riserd.schema.json"
