//! [`HostId`]: the source of default names.

use std::fs;

use super::value::Guid;

/// A host identity that does not change on restart: `identity:` if set, or the machine's identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostId(String);

impl HostId {
    /// Returns the machine ID, or the host name if there is no machine ID. Reads `/etc`.
    pub(super) fn of_machine() -> Self {
        machine_id()
            .or_else(|| read("/proc/sys/kernel/hostname"))
            .map_or_else(|| Self::new("riser"), Self)
    }

    /// Returns true if the machine has a unique ID. Reads `/etc`.
    #[must_use]
    pub fn has_machine_id() -> bool {
        machine_id().is_some()
    }

    /// Creates an identity from this text.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// Returns the text used to derive names.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Derives a number for a purpose and a name. The result only depends on these texts and the
    /// identity, so changing this function would change all derived names in the field. Note that
    /// this is not suitable as a secret or a signature.
    #[must_use]
    pub fn derive(&self, purpose: &str, name: &str) -> u64 {
        // FNV-1a over the texts with their lengths, followed by a finalizer to mix all bits.
        let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
        for text in ["riser", &self.0, purpose, name] {
            // Include the length, so that `ab`, `c` and `a`, `bc` get different names.
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

fn machine_id() -> Option<String> {
    read("/etc/machine-id").filter(|id| is_machine_id(id))
}

/// Checks if a machine ID is unique to this machine. Golden images contain the text `uninitialized`
/// until first boot (machine-id(5)), and containers without systemd keep it.
fn is_machine_id(id: &str) -> bool {
    id != "uninitialized" && id.bytes().any(|byte| byte != b'0')
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
    fn machine_id_of_golden_image_is_absent() {
        for id in ["uninitialized", "00000000000000000000000000000000"] {
            assert!(!is_machine_id(id), "{id}");
        }
        assert!(is_machine_id("0000000000000000000000000000000a"));
    }

    #[test]
    fn derived_names_are_stable_and_distinct() {
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
