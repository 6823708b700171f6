//! [`HostId`]: what names derived by default are derived from.

use std::fs;

use super::value::Guid;

/// An identity that stays the same over restarts: `identity:` in the file, else this machine's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostId(String);

impl HostId {
    /// The machine's id, else its host name. Reads `/etc`.
    pub(super) fn of_machine() -> Self {
        read("/etc/machine-id")
            .or_else(|| read("/proc/sys/kernel/hostname"))
            .map_or_else(|| Self::new("riser"), Self)
    }

    /// An identity of this text.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// The text that names are derived from.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.0
    }

    /// A number for a purpose and a name: the same for the same three texts, always, so changing
    /// this function changes every derived name in the field. It is no secret and no signature.
    #[must_use]
    pub fn derive(&self, purpose: &str, name: &str) -> u64 {
        // FNV-1a over the texts with their lengths, then a finaliser that spreads every bit.
        let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
        for text in ["riser", &self.0, purpose, name] {
            // With its length, so that `ab`, `c` and `a`, `bc` give different names.
            let len = (text.len() as u64).to_le_bytes();
            for &byte in len.iter().chain(text.as_bytes()) {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        }
        hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        hash ^ (hash >> 31)
    }

    /// A GUID of the local scope (IEEE EUI-64 with the local bit set, the group bit clear).
    #[must_use]
    pub fn local_guid(&self, purpose: &str, name: &str) -> Guid {
        let local = 1 << 57;
        let group = 1 << 56;
        Guid((self.derive(purpose, name) | local) & !group)
    }
}

fn read(path: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty() && text != "(none)").then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derived_names_are_fixed_for_ever_and_differ_by_every_part() {
        let host = HostId::new("a");
        assert_eq!(
            host.derive("serial", "disk0"),
            host.derive("serial", "disk0")
        );
        let all = [
            host.derive("serial", "disk0"),
            host.derive("serial", "disk1"),
            host.derive("naa", "disk0"),
            HostId::new("b").derive("serial", "disk0"),
            host.derive("seria", "ldisk0"),
        ];
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
        let guid = host.local_guid("ioc", "t").0;
        assert_eq!(guid >> 56 & 3, 2);
    }
}
