//! Configuration of a logical unit, based on the backend's configuration and the properties of its
//! medium.

use riser_config::{Backend, HostId};
use riser_scsi::config as scsi;

use super::Geometry;

/// Returns the configuration of the logical unit for an open backend.
#[must_use]
pub fn unit_config(backend: &Backend, geometry: &Geometry, host: &HostId) -> scsi::Config {
    let block = geometry.block_size;
    let provisioning = match geometry.unmap_granularity {
        Some(bytes) if backend.thin => scsi::Provisioning::Thin {
            granularity: (bytes / block).max(1),
        },
        _ => scsi::Provisioning::Thick,
    };
    scsi::Config {
        blocks: geometry.capacity / u64::from(block),
        block_size: scsi::BlockSize::from_bytes(block).expect("checked with the file"),
        protection: geometry.protection,
        protection_format: geometry.protection_format,
        physical_exponent: (geometry.physical_block / block).max(1).ilog2().min(15) as u8,
        read_only: geometry.read_only,
        provisioning,
        write_cache: geometry.write_cache,
        stoppable: backend.stoppable,
        rotational: backend.rotational.unwrap_or(geometry.rotational),
        identity: backend.identity(host),
        limits: scsi::Limits::default(),
        cache_generation: None,
        threshold: backend.threshold,
    }
}

#[cfg(test)]
mod tests {
    use riser_config::Config;

    use super::*;

    #[test]
    fn unit_combines_configuration_and_geometry() {
        let text = include_str!("../../../deploy/examples/full.yaml");
        let c = Config::parse(text, "full.yaml").unwrap();
        let host = HostId::of(&c);
        let geometry = Geometry {
            capacity: 1 << 30,
            block_size: 4096,
            physical_block: 4096,
            unmap_granularity: Some(65536),
            read_only: false,
            write_cache: true,
            rotational: false,
            direct: false,
            protection: None,
            protection_format: scsi::ProtectionFormat::Fixed,
        };
        for backend in &c.backends {
            let unit = unit_config(backend, &geometry, &host);
            unit.validate().unwrap();
            assert_eq!(unit.blocks, 262_144);
            let thin = scsi::Provisioning::Thin { granularity: 16 };
            assert_eq!(unit.provisioning, thin);
            assert_eq!(unit.identity, backend.identity(&host));
        }
        let small = Geometry {
            block_size: 512,
            unmap_granularity: None,
            read_only: true,
            ..geometry
        };
        let unit = unit_config(&c.backends[1], &small, &host);
        assert_eq!(unit.physical_exponent, 3);
        assert!(unit.read_only && !unit.is_thin());
    }
}
