//! Compares a logical unit with the model: the same commands must return the same responses and
//! data, and result in the same disk contents.

use std::io;
use std::sync::Arc;

use bolero::generator::bolero_generator::constant;
use bolero::{ValueGenerator, one_of, produce};
use riser_scsi::config::{BlockSize, Config, Identity, Limits, ProtectionFormat, Provisioning};
use riser_scsi::data::designator::Naa;
use riser_scsi::device_server::Request;
use riser_scsi::lu::LogicalUnit;
use riser_scsi::lun::LunId;
use riser_scsi::nexus::{Nexus, NexusId, PortName, TargetPort};
use riser_scsi::opcode::Opcode;
use riser_scsi::reservation::{ReservationKeeper, SavedReservations};
use riser_scsi::step::{
    BlockOp, DataIn, Expected, Residual, Response, Status, Step, StepResult, TaskAttribute,
};

use super::disk::{
    BLOCK, BLOCKS, Code, Command, Disk, MAX_COMPARE, MAX_DESCRIPTORS, MAX_SAME, MAX_TRANSFER,
    MAX_UNMAP, ModelResponse, NEXUSES, Offer, RESERVE_LIST, ReserveOut, unmap_list,
};

/// Accepts all changes to reservations.
#[derive(Debug)]
struct Keeper;

impl ReservationKeeper for Keeper {
    fn load(&self, _: &Identity) -> io::Result<Option<SavedReservations>> {
        Ok(None)
    }

    fn save(&self, _: &Identity, _: Option<&SavedReservations>) -> io::Result<()> {
        Ok(())
    }
}

/// The unit and its disk.
pub(super) struct Device {
    lu: LogicalUnit,
    disk: Vec<u8>,
    /// Number of writes by a command that may stay in the cache.
    cached: usize,
    /// Number of flushes by a command.
    flushes: usize,
}

impl Device {
    pub(super) fn new() -> Self {
        let block = BLOCK as u32;
        let config = Config {
            blocks: BLOCKS,
            block_size: BlockSize::B512,
            protection: None,
            protection_format: ProtectionFormat::default(),
            physical_exponent: 3,
            read_only: false,
            provisioning: Provisioning::Thin { granularity: 1 },
            write_cache: true,
            stoppable: false,
            rotational: false,
            identity: Identity {
                vendor: "FUZZ".into(),
                product: "DISK".into(),
                revision: "1".into(),
                serial: "1".into(),
                naa: Naa::LocallyAssigned(7),
            },
            limits: Limits {
                max_transfer: MAX_TRANSFER as u32 * block,
                // Larger commands are split.
                window: 8 * block,
                segment: 8 * block,
                max_unmap_blocks: MAX_UNMAP as u32,
                max_unmap_descriptors: MAX_DESCRIPTORS as u32,
                max_write_same_blocks: MAX_SAME as u32,
                max_compare_write_blocks: MAX_COMPARE as u8,
                ..Limits::default()
            },
            cache_generation: None,
            threshold: None,
        };
        let lu = LogicalUnit::new(config).expect("a legal configuration");
        let lu = lu.with_keeper(Arc::new(Keeper)).expect("nothing is kept");
        let target = TargetPort {
            name: PortName::Srp([1; 16]),
            relative_id: 1,
            group: 0,
        };
        for id in 0..NEXUSES {
            let initiator = PortName::Srp([id as u8; 16]);
            let target = target.clone();
            lu.add_nexus(NexusId(id as u64), Nexus { initiator, target });
        }
        Self {
            lu,
            disk: vec![0; BLOCKS as usize * BLOCK],
            cached: 0,
            flushes: 0,
        }
    }

    /// Executes a command in the same way as a target. Returns the response and all Data-In.
    pub(super) fn run(
        &mut self,
        nexus: usize,
        cdb: &[u8],
        offer: &Offer<'_>,
    ) -> (Response, Vec<u8>) {
        let request = Request {
            nexus: NexusId(nexus as u64),
            cdb,
            opcode: Opcode::of(cdb),
            expected: Expected {
                data_out: offer.data_out.len() as u32,
                data_in: offer.data_in as u32,
            },
            attribute: TaskAttribute::Simple,
            luns: &[LunId::ZERO],
            read_only: false,
        };
        (self.cached, self.flushes) = (0, 0);
        let (mut command, mut step) = self.lu.start(&request);
        let mut buffer = vec![0xee; command.buffer_len() as usize];
        let mut sent = Vec::new();
        loop {
            let mut result = StepResult::Done;
            match step {
                Step::ReceiveData { from, len } => {
                    let (from, len) = (from as usize, len as usize);
                    buffer[..len].copy_from_slice(&offer.data_out[from..from + len]);
                }
                Step::SendData { from, len } => {
                    assert_eq!(from as usize, sent.len());
                    sent.extend_from_slice(&buffer[..len as usize]);
                }
                Step::Block(BlockOp::ChangeReservations(change)) => {
                    let saved = self.lu.save_reservations(&change);
                    result = StepResult::Reservations(saved.map(drop));
                }
                Step::Block(op) => self.operate(&op, &mut buffer),
                Step::Respond(response) => {
                    match &response.data_in {
                        DataIn::None => {}
                        DataIn::Inline(bytes) => sent.extend_from_slice(bytes),
                        DataIn::Buffer { from, len } => {
                            assert_eq!(*from as usize, sent.len());
                            sent.extend_from_slice(&buffer[..*len as usize]);
                        }
                    }
                    return (response, sent);
                }
            }
            step = command.advance(&self.lu, result, &mut buffer);
        }
    }

    fn operate(&mut self, op: &BlockOp, buffer: &mut [u8]) {
        let disk = |offset: u64, len: u64| offset as usize..(offset + len) as usize;
        match *op {
            BlockOp::Read {
                offset,
                len,
                buffer_offset,
                ..
            } => {
                let bytes = &self.disk[disk(offset, len.into())];
                buffer[buffer_offset as usize..][..len as usize].copy_from_slice(bytes);
            }
            BlockOp::Write {
                offset,
                len,
                buffer_offset,
                fua,
                ..
            } => {
                self.cached += usize::from(!fua);
                let bytes = &buffer[buffer_offset as usize..][..len as usize];
                self.disk[disk(offset, len.into())].copy_from_slice(bytes);
            }
            BlockOp::Discard { offset, len } | BlockOp::WriteZeroes { offset, len, .. } => {
                self.disk[disk(offset, len)].fill(0);
            }
            BlockOp::Flush { .. } => self.flushes += 1,
            BlockOp::Status { .. }
            | BlockOp::ChangeReservations(_)
            | BlockOp::ChangeProtection(_) => {
                unreachable!("not requested by any command here")
            }
        }
    }
}

/// Operation codes of a command for 6, 10, 12 and 16 bytes, or zero if not supported.
type Codes = [u8; 4];

/// Creates a CDB with this extent, using one of the possible lengths.
fn block_cdb(codes: Codes, form: u8, flags: u8, lba: u64, blocks: u64) -> Vec<u8> {
    let fits = |at: &usize| {
        codes[*at] != 0
            && match at {
                // Here, a length of zero is 256 blocks.
                0 => lba < 1 << 21 && (1..256).contains(&blocks) && flags == 0,
                1 | 2 => lba < 1 << 32,
                _ => true,
            }
    };
    let forms: Vec<usize> = (0..4).filter(fits).collect();
    let at = forms[usize::from(form) % forms.len()];
    let mut cdb = vec![codes[at], flags];
    match at {
        0 => {
            cdb[1] = (lba >> 16) as u8;
            cdb.extend([(lba >> 8) as u8, lba as u8, blocks as u8]);
        }
        1 => {
            cdb.extend((lba as u32).to_be_bytes());
            cdb.push(0);
            cdb.extend((blocks as u16).to_be_bytes());
        }
        2 => {
            cdb.extend((lba as u32).to_be_bytes());
            cdb.extend((blocks as u32).to_be_bytes());
            cdb.push(0);
        }
        _ => {
            cdb.extend(lba.to_be_bytes());
            cdb.extend((blocks as u32).to_be_bytes());
            cdb.push(0);
        }
    }
    cdb.push(0);
    cdb
}

/// Creates the CDB of a command using the given form (SPC-4, SBC-3).
fn cdb(command: &Command, form: u8, fua: bool) -> Vec<u8> {
    let fua = u8::from(fua) << 3;
    let of = |codes: Codes, flags: u8, e: &super::disk::Extent| {
        block_cdb(codes, form, flags, e.lba(), e.blocks())
    };
    match command {
        Command::TestUnitReady => vec![0; 6],
        Command::Read(e) => of([0x08, 0x28, 0xa8, 0x88], fua, e),
        Command::Write(e) => of([0x0a, 0x2a, 0xaa, 0x8a], fua, e),
        Command::WriteAndVerify(e, bytchk) => of([0, 0x2e, 0xae, 0x8e], bytchk << 1, e),
        Command::Verify(e, bytchk) => of([0, 0x2f, 0xaf, 0x8f], bytchk << 1, e),
        Command::CompareAndWrite(e) => of([0, 0, 0, 0x89], fua, e),
        Command::OrWrite(e) => of([0, 0, 0, 0x8b], fua, e),
        Command::WriteSame(e, flags) => {
            let bits = u8::from(flags.unmap) << 3 | u8::from(flags.no_data);
            let short = if flags.no_data { 0 } else { 0x41 };
            of([0, short, 0, 0x93], bits, e)
        }
        Command::Unmap(extents) => {
            let [high, low] = (unmap_list(extents).len() as u16).to_be_bytes();
            vec![0x42, 0, 0, 0, 0, 0, 0, high, low, 0]
        }
        Command::SynchronizeCache(e) => of([0, 0x35, 0, 0x91], 0, e),
        Command::ReadCapacity => vec![0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0],
        Command::ReportLuns(select) => vec![0xa0, 0, *select, 0, 0, 0, 0, 0, 1, 0, 0, 0],
        Command::RequestSense => vec![0x03, 0, 0, 0, 252, 0],
        Command::Reserve => vec![0x16, 0, 0, 0, 0, 0],
        Command::Release => vec![0x17, 0, 0, 0, 0, 0],
        Command::ReserveIn(action) => vec![0x5e, *action, 0, 0, 0, 0, 0, 1, 0, 0],
        Command::ReserveOut(out) => {
            vec![
                0x5f,
                out.action,
                out.kind,
                0,
                0,
                0,
                0,
                0,
                RESERVE_LIST as u8,
                0,
            ]
        }
        Command::StartStop(start) => vec![0x1b, 0, 0, 0, u8::from(*start), 0],
    }
}

/// An action of an initiator.
#[derive(Clone, Debug, bolero::TypeGenerator)]
struct Action {
    #[generator(0..NEXUSES)]
    nexus: usize,
    #[generator(any_command())]
    command: Command,
    form: u8,
    fua: bool,
    data: Data,
    #[generator(any_length())]
    length: Length,
    /// If this is large, the unit is reset first.
    reset: u8,
}

/// Reservation commands are more frequent, because several of them are needed to have an effect.
fn any_command() -> impl ValueGenerator<Output = Command> {
    let reserve = produce::<ReserveOut>().map_gen(Command::ReserveOut);
    one_of((produce::<Command>(), reserve))
}

/// In most cases, the buffer has the correct size.
fn any_length() -> impl ValueGenerator<Output = Length> {
    let exact = || constant(Length::Exact);
    one_of((exact(), exact(), exact(), produce::<Length>()))
}

/// Contents of Data-Out.
#[derive(Clone, Copy, Debug, bolero::TypeGenerator)]
enum Data {
    Zeros,
    /// Increasing bytes that start with any value.
    Ramp(u8),
    /// Current data on the disk, followed by the data to write.
    OfDisk(u8),
    /// Same, but with a single different byte.
    NearDisk(u16),
}

/// Size of both buffers.
#[derive(Clone, Copy, Debug, bolero::TypeGenerator)]
enum Length {
    Exact,
    /// The given number of whole blocks, which can be smaller or larger.
    Blocks(#[generator(0..40u8)] u8),
    Any(#[generator(0..20_000u16)] u16),
}

/// Checks that a write with FUA doesn't leave data in a cache, and that a flush command does a
/// flush.
fn check_durability(device: &Device, command: &Command, cdb: &[u8]) {
    let writes = matches!(
        command,
        Command::Write(_) | Command::CompareAndWrite(_) | Command::OrWrite(_)
    );
    // A six-byte CDB doesn't have this bit.
    if writes && cdb.len() > 6 && cdb[1] & 8 != 0 {
        let is_durable = device.cached == 0 || device.flushes > 0;
        assert!(is_durable, "{cdb:02x?} leaves its data in a cache");
    }
    // After the last block, there is nothing to flush.
    if matches!(command, Command::SynchronizeCache(e) if e.lba() < BLOCKS) {
        assert!(device.flushes > 0, "{cdb:02x?} flushes nothing");
    }
}

/// Returns the Data-Out size that is set in the CDB.
fn wanted_out(command: &Command) -> usize {
    match command {
        Command::Write(e) | Command::WriteAndVerify(e, _) | Command::OrWrite(e) => {
            e.blocks() as usize * BLOCK
        }
        Command::Verify(e, 1) => e.blocks() as usize * BLOCK,
        Command::Verify(_, 3) => BLOCK,
        Command::CompareAndWrite(e) => 2 * e.blocks() as usize * BLOCK,
        Command::WriteSame(_, flags) if !flags.no_data => BLOCK,
        Command::Unmap(extents) => unmap_list(extents).len(),
        Command::ReserveOut(_) => RESERVE_LIST,
        _ => 0,
    }
}

fn data_out(action: &Action, model: &Disk) -> Vec<u8> {
    let wanted = wanted_out(&action.command);
    let mut data = match (&action.command, action.data) {
        (Command::Unmap(extents), _) => unmap_list(extents),
        (Command::ReserveOut(out), _) => {
            let mut list = vec![0; RESERVE_LIST];
            (list[7], list[15]) = (out.key, out.action_key);
            // APTPL, which is only valid for registrations.
            list[20] = u8::from(out.persists && matches!(out.action, 0 | 6));
            list
        }
        (_, Data::Zeros) => vec![0; wanted],
        (_, Data::Ramp(from)) => (0..wanted).map(|at| from.wrapping_add(at as u8)).collect(),
        (Command::Verify(e, _) | Command::CompareAndWrite(e), Data::OfDisk(with)) => {
            of_disk(model, e.lba(), e.blocks(), wanted, with)
        }
        (Command::Verify(e, _) | Command::CompareAndWrite(e), Data::NearDisk(at)) => {
            let mut data = of_disk(model, e.lba(), e.blocks(), wanted, at as u8);
            let len = data.len().max(1);
            if let Some(byte) = data.get_mut(usize::from(at) % len) {
                *byte ^= 0x10;
            }
            data
        }
        (_, Data::OfDisk(with)) => vec![with; wanted],
        (_, Data::NearDisk(with)) => vec![with as u8; wanted],
    };
    match action.length {
        Length::Exact => {}
        Length::Blocks(blocks) => data.resize(usize::from(blocks) * BLOCK, 5),
        Length::Any(len) => data.resize(len.into(), 6),
    }
    data
}

fn of_disk(model: &Disk, lba: u64, blocks: u64, wanted: usize, with: u8) -> Vec<u8> {
    let from = (lba.min(BLOCKS) as usize) * BLOCK;
    let to = (from + blocks as usize * BLOCK).min(model.bytes.len());
    let mut data = model.bytes[from..to].to_vec();
    data.resize(wanted, with);
    data
}

/// Returns the sense key, ASC and ASCQ of fixed format sense data and, if valid, INFORMATION.
pub(super) fn sense(data: &[u8]) -> (Code, Option<u64>) {
    assert_eq!(data[0] & 0x7f, 0x70, "{data:02x?}");
    let information = u32::from_be_bytes(data[3..7].try_into().unwrap());
    let is_valid = data[0] & 0x80 != 0;
    let code = (data[2] & 0x0f, data[12], data[13]);
    (code, is_valid.then_some(information.into()))
}

fn residual(wanted: usize, offered: usize) -> Residual {
    match wanted as i64 - offered as i64 {
        0 => Residual::None,
        more @ 1.. => Residual::Overflow(more as u32),
        less => Residual::Underflow(less.unsigned_abs() as u32),
    }
}

fn act(device: &mut Device, model: &mut Disk, action: &Action) {
    let Action { nexus, command, .. } = action;
    let nexus = *nexus;
    if action.reset >= 253 {
        device.lu.reset();
        model.reset();
    }
    let bytes = data_out(action, model);
    let data_in = match (action.length, command) {
        (Length::Exact, Command::Read(e)) => e.blocks() as usize * BLOCK,
        (Length::Exact, _) | (_, Command::RequestSense) => 252,
        (Length::Blocks(blocks), _) => usize::from(blocks) * BLOCK,
        (Length::Any(len), _) => len.into(),
    };
    // The unit parses these lists, so the model has to use the same data.
    let is_list = matches!(command, Command::Unmap(_) | Command::ReserveOut(_));
    let bytes = match is_list && bytes.len() > wanted_out(command) {
        true => bytes[..wanted_out(command)].to_vec(),
        false => bytes,
    };
    let offer = Offer {
        data_out: &bytes,
        data_in,
    };
    let cdb = cdb(command, action.form, action.fua);
    let (response, sent) = device.run(nexus, &cdb, &offer);
    let shown = || format!("{cdb:02x?}: {response:02x?}");

    let pending = model.attentions(nexus);
    let is_free = matches!(command, Command::ReportLuns(_) | Command::RequestSense);
    if !pending.is_empty() && !is_free {
        assert_eq!(response.status, Status::CheckCondition, "{}", shown());
        let (code, _) = sense(&response.sense);
        assert!(pending.remove(&code), "{} of {pending:02x?}", shown());
        return;
    }
    if matches!(command, Command::RequestSense) {
        // This command never returns a conflict, and reports a pending condition.
        assert_eq!(response.status, Status::Good, "{}", shown());
        let (code, _) = sense(&sent);
        let is_right = pending.remove(&code) || (pending.is_empty() && code == (0, 0, 0));
        assert!(is_right, "{} of {pending:02x?}", shown());
        return;
    }
    match model.run(nexus, command, &offer) {
        ModelResponse::Good {
            data_in: expected,
            wanted_in,
            wanted_out,
        } => {
            assert_eq!(response.status, Status::Good, "{}", shown());
            assert_eq!(sent, expected, "{}", shown());
            check_durability(device, command, &cdb);
            assert_eq!(
                response.residual_in,
                residual(wanted_in, data_in),
                "{}",
                shown()
            );
            assert_eq!(
                response.residual_out,
                residual(wanted_out, bytes.len()),
                "{}",
                shown()
            );
        }
        ModelResponse::Conflict => {
            assert_eq!(response.status, Status::ReservationConflict, "{}", shown());
        }
        ModelResponse::Check(codes) => {
            assert_eq!(
                response.status,
                Status::CheckCondition,
                "{} {codes:02x?}",
                shown()
            );
            let (code, _) = sense(&response.sense);
            assert!(codes.contains(&code), "{} {codes:02x?}", shown());
        }
        ModelResponse::Miscompare(at) => {
            assert_eq!(response.status, Status::CheckCondition, "{}", shown());
            let (code, information) = sense(&response.sense);
            assert_eq!(
                (code, information),
                ((0xe, 0x1d, 0), Some(at)),
                "{}",
                shown()
            );
        }
    }
    assert!(device.disk == model.bytes, "other bytes after {}", shown());
}

/// Every command must return the status, sense data, data and residuals defined in the standards,
/// and must have the same effect on the disk.
#[test]
fn unit_matches_model() {
    bolero::check!(name = "unit_matches_model")
        .with_type::<Vec<Action>>()
        .for_each(|actions| {
            let (mut device, mut model) = (Device::new(), Disk::new());
            for action in actions {
                act(&mut device, &mut model, action);
            }
        });
}
