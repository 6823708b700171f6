//! Helpers for the tests of multiple modules.

use riser_scsi::config::{BlockSize, Config, Identity, Limits, ProtectionFormat, Provisioning};
use riser_scsi::data::designator::Naa;

/// Returns the configuration for a unit of `blocks` blocks of 512 bytes, with a write cache.
pub(crate) fn unit_config(blocks: u64) -> Config {
    Config {
        blocks,
        block_size: BlockSize::B512,
        protection: None,
        protection_format: ProtectionFormat::default(),
        physical_exponent: 0,
        read_only: false,
        provisioning: Provisioning::Thick,
        write_cache: true,
        stoppable: false,
        rotational: false,
        identity: Identity {
            vendor: "RISER".into(),
            product: "TEST".into(),
            revision: "1".into(),
            serial: "1".into(),
            naa: Naa::LocallyAssigned(1),
        },
        limits: Limits::default(),
        cache_generation: None,
        threshold: None,
    }
}

/// Same as [`unit_config`], with at most `window` bytes of a command's data in memory.
pub(crate) fn windowed_unit_config(blocks: u64, window: u32) -> Config {
    let mut config = unit_config(blocks);
    config.limits.window = window;
    config
}
