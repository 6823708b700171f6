//! SRP_CMD and its data-buffer descriptors.

use bitflags::bitflags;
use num_enum::TryFromPrimitive;
use zerocopy::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::raw::{Cursor, RawCmd, expect};
use super::{CMD_LEN, ImmediateDataOffset, Opcode, SrpError, Tag};
use crate::lun::WireLun;

/// The longest additional CDB that the ADDITIONAL CDB LENGTH field can name, in bytes.
pub const MAX_ADDITIONAL_CDB: usize = 0xfc;

bitflags! {
    /// Solicited-notification wishes of a request.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub(super) struct SolNt: u8 {
        const SOLNT = 0x01;
        const SCSOLNT = 0x02;
        const UCSOLNT = 0x04;
    }
}

/// A memory descriptor: a range of the initiator's registered memory (SRP r16a, memory descriptor).
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
    /// Length of a memory descriptor, in bytes.
    pub const LEN: usize = 16;

    /// A range of `len` bytes at virtual address `va`, under memory handle (remote key) `key`.
    #[must_use]
    pub fn new(va: u64, key: u32, len: u32) -> Self {
        Self {
            va: va.into(),
            key: key.into(),
            len: len.into(),
        }
    }

    /// Virtual address of the first byte.
    #[must_use]
    pub fn va(&self) -> u64 {
        self.va.get()
    }

    /// Memory handle: the remote key.
    #[must_use]
    pub fn key(&self) -> u32 {
        self.key.get()
    }

    /// Length of the range, in bytes.
    #[must_use]
    pub fn data_len(&self) -> u32 {
        self.len.get()
    }
}

/// An indirect table: descriptors within the command, the whole table, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndirectTable<'a> {
    /// Range of the whole table in the initiator's memory. Its length is that of the table, a
    /// multiple of [`MemDesc::LEN`].
    pub table: MemDesc,
    /// Length of the data that the table describes, in bytes.
    pub len: u32,
    /// The first descriptors of the table, as many as the command carries.
    pub inline: &'a [MemDesc],
}

impl IndirectTable<'_> {
    /// Descriptors in the whole table.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.table.data_len() / MemDesc::LEN as u32
    }

    /// Whether the command carries the whole table. Otherwise it must be read from the initiator.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.inline.len() as u64 == u64::from(self.entries())
    }
}

/// A data buffer of a command, in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DataBuffer<'a> {
    /// No data goes in this direction.
    #[default]
    None,
    /// One range of memory.
    Direct(MemDesc),
    /// A table of ranges.
    Indirect(IndirectTable<'a>),
    /// The data itself travels in the command (SRP-2; data-out only).
    Immediate {
        /// Offset at which it begins.
        offset: ImmediateDataOffset,
        /// Its length, in bytes.
        len: u32,
        /// The bytes. A sender that gathers them from elsewhere leaves this empty and uses
        /// [`Cmd::emit_header`].
        data: &'a [u8],
    },
}

impl DataBuffer<'_> {
    const NONE: u8 = 0;
    const DIRECT: u8 = 1;
    const INDIRECT: u8 = 2;
    const IMMEDIATE: u8 = 3;

    /// Length of the buffer, in bytes.
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

    /// The DESCRIPTOR COUNT field: entries carried inline for an indirect table, otherwise zero.
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

/// Names of one direction's fields, for errors.
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
    let bytes = at.take(names.descriptor, u64::from(count) * MemDesc::LEN as u64)?;
    // A view of the received bytes: the descriptors are not copied, and there is no bound to
    // choose for an array of them.
    let inline = <[MemDesc]>::ref_from_bytes(bytes).expect("a whole number of descriptors");
    let illegal = |field, value| Err(SrpError::Illegal { field, value });
    if !(table.data_len() as usize).is_multiple_of(MemDesc::LEN) {
        return illegal(names.table, table.data_len().into());
    }
    let indirect = IndirectTable { table, len, inline };
    // More descriptors in the command than in the table: one of the two numbers is wrong, and with
    // it the data they lead to.
    if u32::from(count) > indirect.entries() {
        return illegal(names.count, count.into());
    }
    // In 64 bits: 255 lengths of 32 bits do not wrap there. A table that is read later is checked
    // when it is here.
    let described: u64 = inline.iter().map(|d| u64::from(d.data_len())).sum();
    if indirect.is_complete() && described < u64::from(len) {
        return illegal(names.descriptor, len.into());
    }
    Ok(indirect)
}

/// Task attribute (SAM-5 clause 8.9) as SRP_CMD codes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, TryFromPrimitive)]
#[repr(u8)]
pub enum TaskAttr {
    /// No order among simple tasks.
    #[default]
    Simple = 0,
    /// HEAD OF QUEUE: before all others.
    HeadOfQueue = 1,
    /// After all older ones, before all younger ones.
    Ordered = 2,
    /// While an auto contingent allegiance holds.
    Aca = 4,
}

/// SRP_CMD: a SCSI command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cmd<'a> {
    /// Chosen by the initiator, unique among its outstanding requests of the channel.
    pub tag: Tag,
    /// Logical unit number, as eight bytes of SAM-5.
    pub lun: WireLun,
    /// Task attribute of the command.
    pub task_attr: TaskAttr,
    /// SCSOLNT: notify when the command succeeds.
    pub notify_success: bool,
    /// UCSOLNT: notify when it does not.
    pub notify_failure: bool,
    /// The first sixteen bytes of the CDB, zero-padded.
    pub cdb: [u8; 16],
    /// CDB bytes after the sixteenth: a multiple of four, at most [`MAX_ADDITIONAL_CDB`].
    pub additional_cdb: &'a [u8],
    /// Data from the initiator.
    pub data_out: DataBuffer<'a>,
    /// Data to the initiator.
    pub data_in: DataBuffer<'a>,
}

impl<'a> Cmd<'a> {
    /// Parses an SRP_CMD. `immediate` is the offset that the login agreed on, if it did.
    ///
    /// # Errors
    /// A wrong type; fewer bytes than the header, CDB, descriptors or immediate data need; an
    /// undefined task attribute or format; an indirect table whose length is not a whole number of
    /// descriptors, or that carries more of them than it has, or describes less than it says;
    /// immediate data without agreement, for data-in, or overlapping the descriptors.
    pub fn parse(iu: &'a [u8], immediate: Option<ImmediateDataOffset>) -> Result<Self, SrpError> {
        let (raw, _) = RawCmd::split(iu)?;
        expect(raw.opcode, Opcode::Cmd)?;
        let task_attr = raw.task_attr & 0x07;
        let task_attr = TaskAttr::try_from(task_attr).map_err(|_| SrpError::Illegal {
            field: "TASK ATTRIBUTE",
            value: task_attr.into(),
        })?;
        // The additional CDB, the data-out descriptors and the data-in descriptors follow each
        // other without offsets, so each is found by the lengths of those before it.
        let mut at = Cursor::new(iu, CMD_LEN);
        // The field counts words of four bytes in its upper six bits. With the lower two masked it
        // is the number of bytes.
        let additional_cdb = at.take("additional CDB", u64::from(raw.add_cdb_len & 0xfc))?;
        let out_format = raw.buf_fmt >> 4;
        let data_out = match out_format {
            DataBuffer::IMMEDIATE => {
                // The data lies behind every descriptor; it is cut out below, when they are known.
                let len = at.view::<U32>(DATA_OUT.descriptor)?.get();
                // Only where the login agreed on it. Without that SRP r16a has no such format, and
                // nothing says where the data begin.
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
        // Immediate data are no format of data-in, which `parse_buffer` refuses: they travel in
        // the command, and that goes the other way.
        let data_in = parse_buffer(&mut at, raw.buf_fmt & 0x0f, raw.data_in_desc_cnt, &DATA_IN)?;
        let data_out = match data_out {
            DataBuffer::Immediate { offset, len, .. } => {
                // The offset was agreed on before the number of descriptors was known, so they may
                // reach into the data.
                if offset.bytes() < at.position() {
                    return Err(SrpError::Illegal {
                        field: "immediate data offset",
                        value: offset.bytes() as u64,
                    });
                }
                // The cursor must begin within what was received. The gap to the offset is then
                // taken like a field, so that a short information unit is reported, and not read
                // beyond.
                let header = iu.len().min(offset.bytes());
                let mut at = Cursor::new(iu, header);
                at.take("immediate data", (offset.bytes() - header) as u64)?;
                let data = at.take("immediate data", len.into())?;
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

    /// Length of everything before immediate data, in bytes: header, additional CDB and
    /// descriptors; with immediate data, up to the agreed offset.
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

    /// Length of the whole information unit, immediate data included, in bytes.
    #[must_use]
    pub fn wire_len(&self) -> usize {
        match self.data_out {
            DataBuffer::Immediate { len, .. } => self.header_len() + len as usize,
            _ => self.header_len(),
        }
    }

    /// Writes everything but immediate data, and returns the length; immediate data is to follow
    /// directly.
    ///
    /// # Panics
    /// If `out` is too short, the additional CDB's length is not a multiple of four or too large,
    /// there are more than 255 inline descriptors, immediate data would overlap the descriptors, or
    /// data-in is immediate.
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
        .put(out);
        // The parts after the fixed one are in this order, without gaps; only
        // immediate data have an offset of their own.
        out[at..at + additional].copy_from_slice(self.additional_cdb);
        at += additional;
        at += self.data_out.put_descriptor(&mut out[at..]);
        at += self.data_in.put_descriptor(&mut out[at..]);
        if let DataBuffer::Immediate { offset, .. } = self.data_out {
            assert!(at <= offset.bytes(), "immediate data overlaps descriptors");
        }
        // The gap before immediate data goes over the wire, and must not carry what the buffer
        // held before.
        out[at..].fill(0);
        len
    }

    /// Writes the whole information unit and returns its length.
    ///
    /// # Panics
    /// As [`Self::emit_header`]; also if the immediate data's bytes are not given.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let header = self.emit_header(out);
        match self.data_out {
            DataBuffer::Immediate { len, data, .. } => {
                assert_eq!(data.len(), len as usize, "immediate data is given");
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
