//! Detects changes that would swap the numbers of disks in a target.

use crate::config::{Config, Target};

/// A disk would get the number of another disk in the same target. A connected host could then
/// write to the wrong disk.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "LUN {number} of target {target} would become backend {backend}, which is currently LUN \
     {before}, while initiators are logged in: hosts could write to the wrong disk; remove these \
     LUNs first, and add them again in a second change"
)]
pub(super) struct Renumbered {
    target: String,
    number: u16,
    backend: String,
    before: u16,
}

/// Returns the first disk that would get the number of another disk in its target. `is_used` should
/// return true if initiators are logged in to the target.
pub(super) fn find(
    old: &Config,
    new: &Config,
    is_used: impl Fn(&str) -> bool,
) -> Option<Renumbered> {
    let pairs = old.targets.iter().filter_map(|before| {
        let after = new.targets.iter().find(|t| t.name == before.name)?;
        find_in([old, new], [before, after])
    });
    pairs
        .into_iter()
        .find(|renumbered| is_used(&renumbered.target))
}

fn find_in([old, new]: [&Config; 2], [before, after]: [&Target; 2]) -> Option<Renumbered> {
    after.luns.iter().find_map(|(number, lun)| {
        let backend = &new.backend(lun).name;
        let replaced = before.luns.get(number)?;
        if old.backend(replaced).name == *backend {
            return None;
        }
        let mut others = before.luns.iter();
        let (known, _) = others.find(|(_, lun)| old.backend(lun).name == *backend)?;
        Some(Renumbered {
            target: before.name.clone(),
            number: *number,
            backend: backend.clone(),
            before: *known,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(luns: &str) -> Config {
        let text = format!(
            "backends:\n  a: {{ kind: ram, size: 1MiB }}\n  b: {{ kind: ram, size: 1MiB }}\n  \
             c: {{ kind: ram, size: 1MiB }}\ntargets:\n  - name: t\n    \
             portals: [{{ protocol: srp, listen: 127.0.0.1 }}]\n    luns: {luns}\n    access: open\n"
        );
        Config::parse(&text, "test.yaml").unwrap()
    }

    #[test]
    fn disk_with_other_disks_number_is_found() {
        let old = config("{ 0: a, 1: b }");
        let found = |luns: &str| {
            let found = find(&old, &config(luns), |_| true)?;
            Some((found.number, found.backend, found.before))
        };
        assert_eq!(found("{ 0: b, 1: a }"), Some((0, "b".into(), 1)));
        // Disks after a removed disk move up.
        assert_eq!(found("{ 0: b }"), Some((0, "b".into(), 1)));
        assert_eq!(found("{ 0: c, 1: b }"), None, "a new disk");
        assert_eq!(found("{ 1: b, 2: a }"), None, "a free number");
        assert_eq!(found("{ 0: a, 1: b, 2: c }"), None);
        assert_eq!(find(&old, &config("{ 0: b, 1: a }"), |_| false), None);
    }
}
