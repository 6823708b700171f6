//! Examples included in the help of verbs and in their manual pages.

pub(super) const DISCOVER: &str = "\
Examples:
  riser discover srp://192.0.2.10
  riser discover iscsi://me@192.0.2.30
  riser discover --targets-only -o json iscsi://192.0.2.30";

pub(super) const ATTACH: &str = "\
Examples:
  riser attach srp://192.0.2.10/0 --fuse /mnt/disk
  riser attach iscsi://192.0.2.30/iqn.2026-01.com.example:disk1/0 --nbd /run/disk1.sock
  riser attach iser://192.0.2.30/iqn.2026-01.com.example:disk1/0 --ublk=1 --io-timeout never";

pub(super) const DETACH: &str = "\
Examples:
  riser detach 0
  riser detach /mnt/disk
  riser detach /dev/ublkb1 --force";

pub(super) const MOUNT: &str = "\
Examples:
  riser mount srp://192.0.2.10/0 /mnt/data
  riser mount --partition 1 --read-only srp://192.0.2.10/0 /mnt/data
  riser mount -t xfs --options noatime iscsi://192.0.2.30/iqn.2026-01.com.example:disk1/0 /mnt/data";

pub(super) const READ: &str = "\
Examples:
  riser read srp://192.0.2.10/0 disk.img
  riser read srp://192.0.2.10/0 --offset 1M --length 4K";

pub(super) const WRITE: &str = "\
Examples:
  riser write srp://192.0.2.10/0 disk.img
  riser write --overwrite srp://192.0.2.10/0 disk.img --offset 1G";

pub(super) const BENCH: &str = "\
Examples:
  riser bench srp://192.0.2.10/0 --rw randread --depth 32 --runtime 30
  riser bench ./job.fio srp://192.0.2.10/0 -o json
  riser bench mem:1G --sweep depth=1..64 --rounds 3";

pub(super) const RPING: &str = "\
Examples:
  riser rping server --addr 192.0.2.10
  riser rping client 192.0.2.10 --addr 192.0.2.11 --count 1000";

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::args::Args;
    use super::*;

    #[test]
    fn examples_are_valid_commands() {
        for text in [DISCOVER, ATTACH, DETACH, MOUNT, READ, WRITE, BENCH, RPING] {
            let (head, lines) = text.split_once('\n').unwrap();
            assert_eq!(head, "Examples:");
            for line in lines.lines() {
                let parsed = Args::try_parse_from(line.split_whitespace());
                assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
            }
        }
    }
}
