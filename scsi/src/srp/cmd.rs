//! SRP_CMD and its data-buffer descriptors.

use bitflags::bitflags;
use num_enum::TryFromPrimitive;
use zerocopy::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::raw::{Cursor, RawCmd, expect};
use super::{CMD_LEN, ImmediateDataOffset, Opcode, SrpError, Tag};
use crate::lun::WireLun;

/// Maximum size of an additional CDB with the ADDITIONAL CDB LENGTH field, in bytes.
pub const MAX_ADDITIONAL_CDB: usize = 0xfc;

bitflags! {
    /// Solicited notifications requested by the sender.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub(super) struct SolNt: u8 {
        const SOLNT = 0x01;
        const SCSOLNT = 0x02;
        const UCSOLNT = 0x04;
    }
}

/// A memory descriptor, which is a range in the registered memory of the initiator (SRP r16a,
/// memory descriptor).
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    KnownLayout,
    Immutable,
    Unaligned,
)]
#[repr(C)]
pub struct MemDesc {
    va: U64,
    key: U32,
    len: U32,
}

const _: () = assert!(size_of::<MemDesc>() == MemDesc::LEN);

impl MemDesc {
    /// Size of a memory descriptor, in bytes.
    pub const LEN: usize = 16;

    /// Creates a new range of `len` bytes at virtual address `va`, using the memory handle (remote
    /// key) `key`.
    #[must_use]
    pub fn new(va: u64, key: u32, len: u32) -> Self {
        Self {
            va: va.into(),
            key: key.into(),
            len: len.into(),
        }
    }

    /// Returns the virtual address of the first byte.
    #[must_use]
    pub fn va(&self) -> u64 {
        self.va.get()
    }

    /// Returns the memory handle (remote key).
    #[must_use]
    pub fn key(&self) -> u32 {
        self.key.get()
    }

    /// Returns the length of the range, in bytes.
    #[must_use]
    pub fn data_len(&self) -> u32 {
        self.len.get()
    }
}

/// An indirect table. The descriptors can be included in the command, or in a separate table, or
/// both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndirectTable<'a> {
    /// Range of the full table in the initiator's memory. The length is the size of the table,
    /// which is a multiple of [`MemDesc::LEN`].
    pub table: MemDesc,
    /// Total length of the data, in bytes.
    pub len: u32,
    /// The first descriptors in the table that are included in the command.
    pub inline: &'a [MemDesc],
}

impl IndirectTable<'_> {
    /// Returns the total number of descriptors.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.table.data_len() / MemDesc::LEN as u32
    }

    /// Returns whether all descriptors are included in the command. If not, the table must be read
    /// from the initiator.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.inline.len() as u64 == u64::from(self.entries())
    }
}

/// A data buffer for a single direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DataBuffer<'a> {
    /// No data for this direction.
    #[default]
    None,
    /// A single range.
    Direct(MemDesc),
    /// A table of ranges.
    Indirect(IndirectTable<'a>),
    /// The data is included in the command (SRP-2, only for data-out).
    Immediate {
        /// Offset of the data.
        offset: ImmediateDataOffset,
        /// Length of the data, in bytes.
        len: u32,
        /// The data. If the sender has the data in a different buffer, this should be empty, and
        /// [`Cmd::emit_header`] must be used.
        data: &'a [u8],
    },
}

impl DataBuffer<'_> {
    const NONE: u8 = 0;
    const DIRECT: u8 = 1;
    const INDIRECT: u8 = 2;
    const IMMEDIATE: u8 = 3;

    /// Returns the length of the buffer, in bytes.
    #[must_use]
    pub fn data_len(&self) -> u32 {
        match self {
            Self::None => 0,
            Self::Direct(desc) => desc.data_len(),
            Self::Indirect(table) => table.len,
            Self::Immediate { len, .. } => *len,
        }
    }

    fn format(&self) -> u8 {
        match self {
            Self::None => Self::NONE,
            Self::Direct(_) => Self::DIRECT,
            Self::Indirect(_) => Self::INDIRECT,
            Self::Immediate { .. } => Self::IMMEDIATE,
        }
    }

    /// Returns the value for the DESCRIPTOR COUNT field. This is the number of inline entries for
    /// an indirect table, and zero otherwise.
    fn count(&self) -> u8 {
        match self {
            Self::Indirect(table) => {
                u8::try_from(table.inline.len()).expect("at most 255 inline descriptors")
            }
            _ => 0,
        }
    }

    fn descriptor_len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Direct(_) => MemDesc::LEN,
            Self::Indirect(table) => MemDesc::LEN + 4 + table.inline.len() * MemDesc::LEN,
            Self::Immediate { .. } => 4,
        }
    }

    fn put_descriptor(&self, out: &mut [u8]) -> usize {
        match self {
            Self::None => {}
            Self::Direct(desc) => out[..MemDesc::LEN].copy_from_slice(desc.as_bytes()),
            Self::Indirect(table) => {
                out[..MemDesc::LEN].copy_from_slice(table.table.as_bytes());
                out[16..20].copy_from_slice(&table.len.to_be_bytes());
                let inline = table.inline.as_bytes();
                out[20..20 + inline.len()].copy_from_slice(inline);
            }
            Self::Immediate { len, .. } => out[..4].copy_from_slice(&len.to_be_bytes()),
        }
        self.descriptor_len()
    }
}

/// Field names for each direction, used in errors.
struct Names {
    format: &'static str,
    descriptor: &'static str,
    table: &'static str,
    count: &'static str,
}

const DATA_OUT: Names = Names {
    format: "DATA-OUT BUFFER DESCRIPTOR FORMAT",
    descriptor: "data-out buffer descriptor",
    table: "data-out indirect table length",
    count: "DATA-OUT BUFFER DESCRIPTOR COUNT",
};
const DATA_IN: Names = Names {
    format: "DATA-IN BUFFER DESCRIPTOR FORMAT",
    descriptor: "data-in buffer descriptor",
    table: "data-in indirect table length",
    count: "DATA-IN BUFFER DESCRIPTOR COUNT",
};

fn parse_indirect<'a>(
    at: &mut Cursor<'a>,
    count: u8,
    names: &Names,
) -> Result<IndirectTable<'a>, SrpError> {
    let table = *at.view::<MemDesc>(names.descriptor)?;
    let len = at.view::<U32>(names.descriptor)?.get();
    let bytes = at.take_bytes(names.descriptor, u64::from(count) * MemDesc::LEN as u64)?;
    // Create a view of the received bytes, so that we don't need to copy the descriptors and don't
    // need an array with a maximum size.
    let inline = <[MemDesc]>::ref_from_bytes(bytes).expect("multiple of the descriptor size");
    let illegal = |field, value| Err(SrpError::Illegal { field, value });
    if !(table.data_len() as usize).is_multiple_of(MemDesc::LEN) {
        return illegal(names.table, table.data_len().into());
    }
    let indirect = IndirectTable { table, len, inline };
    // There can't be more descriptors in the command than in the table. One of these two numbers
    // must be invalid, so we can't use this data.
    if u32::from(count) > indirect.entries() {
        return illegal(names.count, count.into());
    }
    // Use 64 bits, which can't overflow for 255 lengths of 32 bits. If the table has to be read
    // later, it's checked after that.
    let described: u64 = inline.iter().map(|d| u64::from(d.data_len())).sum();
    if indirect.is_complete() && described < u64::from(len) {
        return illegal(names.descriptor, len.into());
    }
    Ok(indirect)
}

/// Task attribute (SAM-5 clause 8.9), encoded as in SRP_CMD.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, TryFromPrimitive)]
#[repr(u8)]
pub enum TaskAttr {
    /// Can be reordered with other simple tasks.
    #[default]
    Simple = 0,
    /// HEAD OF QUEUE: executed before all other tasks.
    HeadOfQueue = 1,
    /// Executed after all older tasks and before newer tasks.
    Ordered = 2,
    /// Used while there is an auto contingent allegiance.
    Aca = 4,
}

/// SRP_CMD: a SCSI command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cmd<'a> {
    /// Tag selected by the initiator. This must be unique for all outstanding requests in a
    /// channel.
    pub tag: Tag,
    /// Logical unit number, in the 8-byte SAM-5 format.
    pub lun: WireLun,
    /// Task attribute of the command.
    pub task_attr: TaskAttr,
    /// SCSOLNT: request a notification on success.
    pub notify_success: bool,
    /// UCSOLNT: request a notification on failure.
    pub notify_failure: bool,
    /// The first 16 bytes of the CDB, padded with zeros.
    pub cdb: [u8; 16],
    /// The remaining bytes of the CDB. The size is a multiple of 4, and at most
    /// [`MAX_ADDITIONAL_CDB`].
    pub additional_cdb: &'a [u8],
    /// Data sent by the initiator.
    pub data_out: DataBuffer<'a>,
    /// Data sent to the initiator.
    pub data_in: DataBuffer<'a>,
}

impl<'a> Cmd<'a> {
    /// Parses an SRP_CMD. `immediate` is the offset for immediate data, if this was negotiated in
    /// the login.
    ///
    /// # Errors
    /// Returns an error if the type is unexpected, the buffer is too short for the header, CDB,
    /// descriptors or immediate data, or the task attribute or format is undefined. For an indirect
    /// table, if the size is not a multiple of the descriptor size, if there are more inline
    /// descriptors than descriptors in the table, or if the total length is too small. For
    /// immediate data, if it was not negotiated, is used for data-in, or overlaps with the
    /// descriptors.
    pub fn parse(iu: &'a [u8], immediate: Option<ImmediateDataOffset>) -> Result<Self, SrpError> {
        let (raw, _) = RawCmd::split(iu)?;
        expect(raw.opcode, Opcode::Cmd)?;
        let task_attr = raw.task_attr & 0x07;
        let task_attr = TaskAttr::try_from(task_attr).map_err(|_| SrpError::Illegal {
            field: "TASK ATTRIBUTE",
            value: task_attr.into(),
        })?;
        // There is no offset for the additional CDB, the data-out descriptors and the data-in
        // descriptors, so we need to parse all of them in order.
        let mut at = Cursor::new(iu, CMD_LEN);
        // The upper 6 bits of this field are the length in 4-byte words. If we mask the lower 2
        // bits, this is the number of bytes.
        let additional_cdb = at.take_bytes("additional CDB", u64::from(raw.add_cdb_len & 0xfc))?;
        let out_format = raw.buf_fmt >> 4;
        let data_out = match out_format {
            DataBuffer::IMMEDIATE => {
                // The data is after all descriptors, so we can only get it below.
                let len = at.view::<U32>(DATA_OUT.descriptor)?.get();
                // This must be negotiated in the login. The format does not exist in SRP r16a, and
                // we need the offset to find the data.
                let offset = immediate.ok_or(SrpError::Illegal {
                    field: DATA_OUT.format,
                    value: out_format.into(),
                })?;
                DataBuffer::Immediate {
                    offset,
                    len,
                    data: &[],
                }
            }
            format => parse_buffer(&mut at, format, raw.data_out_desc_cnt, &DATA_OUT)?,
        };
        // Immediate data is sent with the command, so it can't be used for data-in. This will be
        // refused in `parse_buffer`.
        let data_in = parse_buffer(&mut at, raw.buf_fmt & 0x0f, raw.data_in_desc_cnt, &DATA_IN)?;
        let data_out = match data_out {
            DataBuffer::Immediate { offset, len, .. } => {
                // The offset was set before the number of descriptors was known, so the data may
                // overlap with the descriptors.
                if offset.bytes() < at.position() {
                    return Err(SrpError::Illegal {
                        field: "immediate data offset",
                        value: offset.bytes() as u64,
                    });
                }
                // The cursor must start within the received bytes. We then skip the gap before the
                // data like any other field, so that we report an error instead of reading past the
                // end if the message is too short.
                let header = iu.len().min(offset.bytes());
                let mut at = Cursor::new(iu, header);
                at.take_bytes("immediate data", (offset.bytes() - header) as u64)?;
                let data = at.take_bytes("immediate data", len.into())?;
                DataBuffer::Immediate { offset, len, data }
            }
            other => other,
        };
        let notify = SolNt::from_bits_truncate(raw.sol_not);
        Ok(Self {
            tag: Tag(raw.tag.get()),
            lun: raw.lun,
            task_attr,
            notify_success: notify.contains(SolNt::SCSOLNT),
            notify_failure: notify.contains(SolNt::UCSOLNT),
            cdb: raw.cdb,
            additional_cdb,
            data_out,
            data_in,
        })
    }

    /// Returns the size of everything before the immediate data, in bytes. This is the header,
    /// additional CDB and descriptors. If there is immediate data, it is the negotiated offset.
    #[must_use]
    pub fn header_len(&self) -> usize {
        let described = CMD_LEN
            + self.additional_cdb.len()
            + self.data_out.descriptor_len()
            + self.data_in.descriptor_len();
        match self.data_out {
            DataBuffer::Immediate { offset, .. } => offset.bytes().max(described),
            _ => described,
        }
    }

    /// Returns the total size including immediate data, in bytes.
    #[must_use]
    pub fn wire_len(&self) -> usize {
        match self.data_out {
            DataBuffer::Immediate { len, .. } => self.header_len() + len as usize,
            _ => self.header_len(),
        }
    }

    /// Writes everything except for immediate data to `out`, and returns the number of bytes. If
    /// there is immediate data, this must be sent directly after it.
    ///
    /// # Panics
    /// If `out` is too short, the size of the additional CDB is not a multiple of 4 or too large,
    /// there are more than 255 inline descriptors, immediate data would overlap with the
    /// descriptors, or immediate data is used for data-in.
    pub fn emit_header(&self, out: &mut [u8]) -> usize {
        let additional = self.additional_cdb.len();
        assert!(additional.is_multiple_of(4) && additional <= MAX_ADDITIONAL_CDB);
        assert!(!matches!(self.data_in, DataBuffer::Immediate { .. }));
        let len = self.header_len();
        let out = &mut out[..len];
        let mut notify = SolNt::empty();
        notify.set(SolNt::SCSOLNT, self.notify_success);
        notify.set(SolNt::UCSOLNT, self.notify_failure);
        let mut at = RawCmd {
            opcode: Opcode::Cmd as u8,
            sol_not: notify.bits(),
            buf_fmt: self.data_out.format() << 4 | self.data_in.format(),
            data_out_desc_cnt: self.data_out.count(),
            data_in_desc_cnt: self.data_in.count(),
            tag: self.tag.0.into(),
            lun: self.lun,
            task_attr: self.task_attr as u8,
            add_cdb_len: additional as u8,
            cdb: self.cdb,
            ..RawCmd::default()
        }
        .write_to(out);
        // These parts must be written in this order and without gaps. Only immediate data uses an
        // offset.
        out[at..at + additional].copy_from_slice(self.additional_cdb);
        at += additional;
        at += self.data_out.put_descriptor(&mut out[at..]);
        at += self.data_in.put_descriptor(&mut out[at..]);
        if let DataBuffer::Immediate { offset, .. } = self.data_out {
            assert!(at <= offset.bytes(), "immediate data overlaps descriptors");
        }
        // The gap before the immediate data is also sent to the peer, so it must not contain old
        // data from this buffer.
        out[at..].fill(0);
        len
    }

    /// Writes the entire IU to `out` and returns the number of bytes.
    ///
    /// # Panics
    /// Same as for [`Self::emit_header`], and if there is immediate data that was not provided.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let header = self.emit_header(out);
        match self.data_out {
            DataBuffer::Immediate { len, data, .. } => {
                assert_eq!(data.len(), len as usize, "missing immediate data");
                out[header..header + data.len()].copy_from_slice(data);
                header + data.len()
            }
            _ => header,
        }
    }
}

fn parse_buffer<'a>(
    at: &mut Cursor<'a>,
    format: u8,
    count: u8,
    names: &Names,
) -> Result<DataBuffer<'a>, SrpError> {
    Ok(match format {
        DataBuffer::NONE => DataBuffer::None,
        DataBuffer::DIRECT => DataBuffer::Direct(*at.view::<MemDesc>(names.descriptor)?),
        DataBuffer::INDIRECT => DataBuffer::Indirect(parse_indirect(at, count, names)?),
        other => {
            return Err(SrpError::Illegal {
                field: names.format,
                value: other.into(),
            });
        }
    })
}
