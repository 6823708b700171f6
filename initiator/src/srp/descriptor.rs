//! Conversion of registered memory to the descriptors of an SRP_CMD.

use riser_scsi::srp::MemDesc;

/// A registered range of memory for use by the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Address used by the target.
    pub va: u64,
    /// Remote key of the memory.
    pub key: u32,
    /// Length of the range in bytes.
    pub len: u64,
}

/// Layout of the descriptors of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DescriptorLayout {
    /// No data.
    None,
    /// A single descriptor in the command.
    Direct,
    /// A table in the command.
    Inline,
    /// A table in memory that the target reads. Its first descriptors are also in the command.
    External {
        /// Number of descriptors in the command.
        inline: u8,
    },
}

/// Descriptor limits of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorLimits {
    /// Maximum number of descriptors in a command: at most 255, and limited by the length of the
    /// information unit.
    pub inline: u8,
    /// Maximum number of descriptors in an external table; 0 if the target does not support
    /// external tables.
    pub external: u32,
}

/// A command needs more descriptors than allowed on the channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{count} memory descriptors exceed the limit of {max}")]
pub struct TooManyDescriptors {
    /// Number of descriptors needed by the command.
    pub count: usize,
    /// Maximum number of descriptors on the channel.
    pub max: usize,
}

/// Splits segments into descriptors of at most `max_len` bytes, in order, and appends them to
/// `out`. Skips empty segments; the total length is unchanged.
///
/// # Panics
/// Panics if `max_len` is 0.
pub fn plan_descriptors(
    segments: impl IntoIterator<Item = Segment>,
    max_len: u32,
    out: &mut Vec<MemDesc>,
) {
    assert!(max_len > 0);
    for segment in segments {
        let (mut va, mut left) = (segment.va, segment.len);
        while left > 0 {
            let len = left.min(max_len.into()) as u32;
            out.push(MemDesc::new(va, segment.key, len));
            va = va.wrapping_add(len.into());
            left -= u64::from(len);
        }
    }
}

/// Selects the layout for `count` descriptors.
///
/// # Errors
/// [`TooManyDescriptors`] if neither the command nor a table can hold them.
pub fn plan_layout(
    count: usize,
    limits: DescriptorLimits,
) -> Result<DescriptorLayout, TooManyDescriptors> {
    match count {
        0 => Ok(DescriptorLayout::None),
        1 => Ok(DescriptorLayout::Direct),
        _ if count <= usize::from(limits.inline) => Ok(DescriptorLayout::Inline),
        _ if count <= limits.external as usize => Ok(DescriptorLayout::External {
            inline: limits.inline,
        }),
        _ => Err(TooManyDescriptors {
            count,
            max: usize::from(limits.inline).max(limits.external as usize),
        }),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn layout_depends_on_descriptor_count() {
        let limits = DescriptorLimits {
            inline: 4,
            external: 16,
        };
        let place = |count| plan_layout(count, limits);
        assert_eq!(place(0), Ok(DescriptorLayout::None));
        assert_eq!(place(1), Ok(DescriptorLayout::Direct));
        assert_eq!(place(4), Ok(DescriptorLayout::Inline));
        assert_eq!(place(5), Ok(DescriptorLayout::External { inline: 4 }));
        assert_eq!(place(16), Ok(DescriptorLayout::External { inline: 4 }));
        assert_eq!(place(17), Err(TooManyDescriptors { count: 17, max: 16 }));
        let limits = DescriptorLimits {
            inline: 4,
            external: 0,
        };
        assert!(plan_layout(5, limits).is_err());
    }

    proptest! {
        #[test]
        fn splitting_conserves_bytes_and_order(
            segments in proptest::collection::vec((any::<u64>(), any::<u32>(), 0u64..5000), 0..20),
            max_len in 1u32..6000,
        ) {
            let mut descs = Vec::new();
            let parts = segments.iter().map(|&(va, key, len)| Segment { va, key, len });
            plan_descriptors(parts, max_len, &mut descs);
            let mut rest = descs.as_slice();
            for (mut va, key, mut left) in segments {
                while left > 0 {
                    let desc = rest.split_off_first().unwrap();
                    prop_assert_eq!((desc.va(), desc.key()), (va, key));
                    prop_assert!(desc.data_len() > 0 && desc.data_len() <= max_len);
                    va = va.wrapping_add(desc.data_len().into());
                    left = left.checked_sub(desc.data_len().into()).unwrap();
                }
            }
            prop_assert!(rest.is_empty());
        }
    }
}
