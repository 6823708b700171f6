//! Examples for the help texts of commands and their manual pages.

use clap::Command;

/// Examples by command.
const EXAMPLES: [(&str, &[&str]); 17] = [
    (
        "run",
        &[
            "riserd run --config /etc/riser/riserd.yaml",
            "riserd run --config riserd.yaml --restore",
        ],
    ),
    (
        "check",
        &[
            "riserd check riserd.yaml",
            "riserd check --open -o json riserd.yaml",
        ],
    ),
    ("apply", &["riserd apply riserd.yaml"]),
    ("diff", &["riserd diff riserd.yaml"]),
    (
        "save",
        &["riserd save", "riserd save /etc/riser/riserd.yaml"],
    ),
    ("rollback", &["riserd rollback", "riserd rollback 3"]),
    (
        "scrub",
        &[
            "riserd scrub disk0 --rate 200MiB",
            "riserd scrub",
            "riserd scrub disk0 --stop",
        ],
    ),
    (
        "import-disk",
        &[
            "riserd import-disk --type 1 /srv/lio.img /srv/disk.img",
            "riserd import-disk --type 3 --block-size 4096 /srv/lio.img /srv/disk.img",
        ],
    ),
    (
        "export-disk",
        &["riserd export-disk /srv/disk.img /srv/lio.img"],
    ),
    (
        "disconnect",
        &[
            "riserd disconnect iqn.1993-08.org.debian:01:host-1",
            "riserd disconnect 17",
            "riserd disconnect iqn.1993-08.org.debian:01:host-1 --block",
            "riserd disconnect iqn.1993-08.org.debian:01:host-1 --block --for 10m",
        ],
    ),
    (
        "unblock",
        &["riserd unblock iqn.1993-08.org.debian:01:host-1"],
    ),
    (
        "top",
        &["riserd top", "riserd top --once --interval 10 -o json"],
    ),
    (
        "trace",
        &[
            "riserd trace --lun 0 --slower-than 5ms",
            "riserd trace --initiator iqn.1993-08.org.debian:01:host-1 --count 20 --for 60s",
        ],
    ),
    ("ls", &["riserd ls", "riserd ls /targets/demo --depth 1"]),
    (
        "set",
        &[
            "riserd set /backends/disk0 size=2TiB",
            "riserd set /backends/disk0/limits iops=5000",
            "riserd set /log filter=info,riser_target=debug",
        ],
    ),
    (
        "create",
        &[
            "riserd create /backends/disk1 kind=file path=/srv/disk1.img size=1TiB create=true",
            "riserd create /targets/demo/luns/1 backend=disk1",
            "riserd create /targets/demo/portals protocol=iscsi listen=192.0.2.10",
        ],
    ),
    (
        "delete",
        &[
            "riserd delete /targets/demo/luns/1",
            "riserd delete /backends/disk0/limits",
        ],
    ),
];

/// Heading before examples in a help text.
pub(super) const HEAD: &str = "Examples:";

/// Adds examples to the help texts of commands.
pub(super) fn add(command: Command) -> Command {
    EXAMPLES.iter().fold(command, |command, (verb, examples)| {
        command.mut_subcommand(verb, |verb| {
            let before = verb.get_after_help().map(|text| format!("{text}\n\n"));
            let lines: String = examples.iter().map(|line| format!("\n  {line}")).collect();
            verb.after_help(format!("{}{HEAD}{lines}", before.unwrap_or_default()))
        })
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::super::Cli;
    use super::*;

    #[test]
    fn examples_are_valid_commands() {
        for (_, examples) in EXAMPLES {
            for line in examples {
                let parsed = Cli::command().try_get_matches_from(line.split_whitespace());
                assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
            }
        }
    }
}
