//! Finds unallocated parts of a region. Reads from these are not representative of a disk that is
//! full of data.

use std::ops::Range;
use std::time::{Duration, Instant};

use riser_block::{BlockDevice, ExtentKind, task};

use super::outcome::Holes;

/// No further request is sent after this time, because the run has to wait for the response.
const PATIENCE: Duration = Duration::from_secs(1);

/// Maximum number of requests for a region.
const MAX_CALLS: usize = 1024;

/// Queries the unallocated parts of a region. Returns `None` if this is not supported by the
/// device. Parts not covered within the limits are counted as allocated.
pub(super) fn of<D: BlockDevice>(device: &D, region: &Range<u64>) -> Option<Holes> {
    let until = Instant::now() + PATIENCE;
    within(device, region, || Instant::now() >= until)
}

fn within<D: BlockDevice>(
    device: &D,
    region: &Range<u64>,
    is_over: impl Fn() -> bool,
) -> Option<Holes> {
    if !device.geometry().reports_status {
        return None;
    }
    let mut bytes = 0;
    let mut at = region.start;
    for _ in 0..MAX_CALLS {
        if at >= region.end || is_over() {
            break;
        }
        // If the device has failed, the job itself will report this.
        let Ok(extents) = task::block_on(device.status(at..region.end)) else {
            break;
        };
        for extent in extents {
            if extent.kind == ExtentKind::Hole {
                bytes += extent.len;
            }
            at += extent.len;
        }
    }
    let of = region.end - region.start;
    Some(Holes { bytes, of })
}

#[cfg(test)]
mod tests {
    use riser_block::MemoryDevice;

    use super::*;

    #[test]
    fn unwritten_blocks_are_holes() {
        let device = MemoryDevice::new(1 << 20, 512).unwrap();
        let buffer = device.try_buffer(65536).unwrap();
        task::block_on(device.write(131_072, buffer, false)).unwrap();
        let holes = of(&device, &(65536..1 << 20)).unwrap();
        assert_eq!(holes.of, (1 << 20) - 65536);
        assert_eq!(holes.bytes, holes.of - 65536);
        // A slow device must not delay the run.
        let holes = within(&device, &(65536..1 << 20), || true).unwrap();
        assert_eq!(holes.bytes, 0);
    }
}
