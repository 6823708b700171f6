//! A model of a disk based on SPC-4, SBC-3 and SAM-5: its blocks, persistent and other
//! reservations, and unit attentions.
//!
//! If the standards allow more than one response, we either return a set of responses or add a
//! comment with our choice.

use std::collections::BTreeSet;

pub(super) const BLOCK: usize = 512;
pub(super) const BLOCKS: u64 = 64;
/// Limits reported by the unit, in blocks.
pub(super) const MAX_TRANSFER: u64 = 32;
pub(super) const MAX_SAME: u64 = 24;
pub(super) const MAX_COMPARE: u64 = 3;
pub(super) const MAX_UNMAP: u64 = 40;
pub(super) const MAX_DESCRIPTORS: usize = 4;
/// Number of I_T nexuses.
pub(super) const NEXUSES: usize = 3;

/// Sense key, ASC, ASCQ.
pub(super) type Code = (u8, u8, u8);

const OUT_OF_RANGE: Code = (5, 0x21, 0);
const INVALID_FIELD: Code = (5, 0x24, 0);
const INVALID_PARAMETER: Code = (5, 0x26, 0);
const LIST_LENGTH: Code = (5, 0x1a, 0);
/// INVALID FIELD IN COMMAND INFORMATION UNIT: the buffer size doesn't match the CDB (FCP-4
/// 9.4.2.9).
const BUFFER: Code = (5, 0x0e, 3);
const INVALID_RELEASE: Code = (5, 0x26, 4);

const RESERVATIONS_PREEMPTED: Code = (6, 0x2a, 3);
const RESERVATIONS_RELEASED: Code = (6, 0x2a, 4);
const REGISTRATIONS_PREEMPTED: Code = (6, 0x2a, 5);
const POWER_ON: Code = (6, 0x29, 0);
const DEVICE_RESET: Code = (6, 0x29, 3);

/// A command, which can be sent using any CDB length.
#[derive(Clone, Debug, bolero::TypeGenerator)]
pub(super) enum Command {
    TestUnitReady,
    Read(Extent),
    Write(Extent),
    WriteAndVerify(Extent, #[generator(0..4u8)] u8),
    Verify(Extent, #[generator(0..4u8)] u8),
    CompareAndWrite(Extent),
    OrWrite(Extent),
    WriteSame(Extent, SameFlags),
    Unmap(Vec<Extent>),
    SynchronizeCache(Extent),
    ReadCapacity,
    ReportLuns(#[generator(0..4u8)] u8),
    RequestSense,
    Reserve,
    Release,
    ReserveIn(#[generator(0..2u8)] u8),
    ReserveOut(ReserveOut),
    StartStop(bool),
}

/// Blocks used by a command.
#[derive(Clone, Copy, Debug, bolero::TypeGenerator)]
pub(super) struct Extent {
    #[generator(0..70u8)]
    lba: u8,
    #[generator(0..40u8)]
    blocks: u8,
    /// If this is large, the LBA is at the end of the address range.
    far: u8,
}

impl Extent {
    pub(super) fn lba(self) -> u64 {
        match self.is_far() {
            true => u64::MAX - u64::from(self.lba),
            false => self.lba.into(),
        }
    }

    pub(super) fn blocks(self) -> u64 {
        self.blocks.into()
    }

    fn is_far(self) -> bool {
        self.far >= 240
    }

    fn is_in_range(self) -> bool {
        !self.is_far() && self.lba() + self.blocks() <= BLOCKS
    }

    /// Returns the byte range of the first blocks on the disk.
    fn bytes(self, blocks: u64) -> std::ops::Range<usize> {
        let from = usize::from(self.lba) * BLOCK;
        from..from + blocks as usize * BLOCK
    }
}

#[derive(Clone, Copy, Debug, bolero::TypeGenerator)]
pub(super) struct SameFlags {
    pub(super) unmap: bool,
    pub(super) no_data: bool,
}

#[derive(Clone, Copy, Debug, bolero::TypeGenerator)]
pub(super) struct ReserveOut {
    #[generator(0..7u8)]
    pub(super) action: u8,
    #[generator(0..10u8)]
    pub(super) kind: u8,
    #[generator(0..3u8)]
    pub(super) key: u8,
    #[generator(0..3u8)]
    pub(super) action_key: u8,
    pub(super) persists: bool,
}

/// Response to a command.
#[derive(Debug, PartialEq)]
pub(super) enum ModelResponse {
    Good {
        data_in: Vec<u8>,
        /// Number of bytes that would be transferred if the buffers were large enough.
        wanted_in: usize,
        wanted_out: usize,
    },
    /// Any of these, because the standards don't define an order.
    Check(Vec<Code>),
    /// MISCOMPARE, with the offset of the first difference (SBC-3 5.36).
    Miscompare(u64),
    Conflict,
}

impl ModelResponse {
    fn good(wanted_out: usize) -> Self {
        Self::data_in(Vec::new(), 0, wanted_out)
    }

    fn data_in(data_in: Vec<u8>, wanted_in: usize, wanted_out: usize) -> Self {
        Self::Good {
            data_in,
            wanted_in,
            wanted_out,
        }
    }
}

/// Buffers provided by the initiator for a command.
pub(super) struct Offer<'a> {
    pub(super) data_out: &'a [u8],
    pub(super) data_in: usize,
}

#[derive(Default)]
pub(super) struct Disk {
    pub(super) bytes: Vec<u8>,
    attentions: [BTreeSet<Code>; NEXUSES],
    /// Registered nexuses and their keys, in order of registration.
    registered: Vec<(usize, u64)>,
    /// Nexus that created the persistent reservation, and its type.
    held: Option<(usize, u8)>,
    generation: u32,
    /// Nexus that reserved the unit using RESERVE (SPC-2).
    reserved: Option<usize>,
}

impl Disk {
    pub(super) fn new() -> Self {
        Self {
            bytes: vec![0; BLOCKS as usize * BLOCK],
            attentions: std::array::from_fn(|_| BTreeSet::from([POWER_ON])),
            ..Self::default()
        }
    }

    /// LOGICAL UNIT RESET (SAM-5 6.3.3): clears RESERVE, but not persistent reservations.
    pub(super) fn reset(&mut self) {
        self.attentions = std::array::from_fn(|_| BTreeSet::from([DEVICE_RESET]));
        self.reserved = None;
    }

    /// Returns the pending conditions for a nexus. All commands except INQUIRY, REPORT LUNS and
    /// REQUEST SENSE will report one of these first (SAM-5 5.14.1).
    pub(super) fn attentions(&mut self, nexus: usize) -> &mut BTreeSet<Code> {
        &mut self.attentions[nexus]
    }

    fn raise(&mut self, code: Code, of: impl Fn(usize) -> bool) {
        for (nexus, attentions) in self.attentions.iter_mut().enumerate() {
            if of(nexus) {
                attentions.insert(code);
            }
        }
    }

    pub(super) fn run(
        &mut self,
        nexus: usize,
        command: &Command,
        offer: &Offer<'_>,
    ) -> ModelResponse {
        if self.conflicts(nexus, command) {
            return ModelResponse::Conflict;
        }
        match command {
            Command::TestUnitReady | Command::StartStop(_) => ModelResponse::good(0),
            Command::Read(extent) => match Self::refuses(*extent) {
                Some(refusal) => refusal,
                None => {
                    let bytes = &self.bytes[extent.bytes(extent.blocks())];
                    let moved = bytes.len().min(offer.data_in);
                    ModelResponse::data_in(bytes[..moved].to_vec(), bytes.len(), 0)
                }
            },
            Command::Write(extent) => self.write(*extent, offer, |_, new| new),
            Command::OrWrite(extent) => self.write(*extent, offer, |old, new| old | new),
            Command::WriteAndVerify(extent, 0 | 1) => self.write(*extent, offer, |_, new| new),
            Command::WriteAndVerify(..) => ModelResponse::Check(vec![INVALID_FIELD, OUT_OF_RANGE]),
            Command::Verify(extent, compare) => self.verify(*extent, *compare, offer),
            Command::CompareAndWrite(extent) => self.compare_and_write(*extent, offer),
            Command::WriteSame(extent, flags) => self.write_same(*extent, *flags, offer),
            Command::Unmap(extents) => self.unmap(extents, offer),
            Command::SynchronizeCache(extent) if extent.is_in_range() => ModelResponse::good(0),
            Command::SynchronizeCache(_) => ModelResponse::Check(vec![OUT_OF_RANGE]),
            Command::ReadCapacity => {
                let mut data = vec![0; 32];
                data[7] = (BLOCKS - 1) as u8;
                data[10..12].copy_from_slice(&(BLOCK as u16).to_be_bytes());
                // Eight logical blocks per physical block; LBPME and LBPRZ are set.
                (data[13], data[14]) = (3, 0xc0);
                Self::parameters(data, offer)
            }
            Command::ReportLuns(0 | 2) => {
                let mut data = vec![0; 16];
                data[3] = 8;
                Self::parameters(data, offer)
            }
            Command::ReportLuns(1) => Self::parameters(vec![0; 8], offer),
            Command::ReportLuns(_) => ModelResponse::Check(vec![INVALID_FIELD]),
            // The caller knows which condition was reported.
            Command::RequestSense => ModelResponse::good(0),
            Command::Reserve => match self.reserved.is_none_or(|holder| holder == nexus) {
                // If there is a registration, RESERVE returns a conflict (SPC-3 5.6.3).
                true if self.registered.is_empty() => {
                    self.reserved = Some(nexus);
                    ModelResponse::good(0)
                }
                _ => ModelResponse::Conflict,
            },
            Command::Release if !self.registered.is_empty() => ModelResponse::Conflict,
            Command::Release => {
                self.reserved = self.reserved.filter(|holder| *holder != nexus);
                ModelResponse::good(0)
            }
            Command::ReserveIn(action) => Self::parameters(self.reservations(*action), offer),
            Command::ReserveOut(out) => self.reserve_out(nexus, out, offer),
        }
    }

    /// Returns parameter data, which is not truncated to the allocation length here.
    fn parameters(mut data: Vec<u8>, offer: &Offer<'_>) -> ModelResponse {
        let wanted = data.len();
        data.truncate(offer.data_in);
        ModelResponse::data_in(data, wanted, 0)
    }

    /// Rejects blocks that are out of range, or a length larger than MAXIMUM TRANSFER LENGTH.
    fn refuses(extent: Extent) -> Option<ModelResponse> {
        let mut codes = Vec::new();
        if !extent.is_in_range() {
            codes.push(OUT_OF_RANGE);
        }
        if extent.blocks() > MAX_TRANSFER {
            codes.push(INVALID_FIELD);
        }
        (!codes.is_empty()).then_some(ModelResponse::Check(codes))
    }

    /// Returns the number of Data-Out blocks for a command. A partial block is rejected, but fewer
    /// blocks are accepted (this is our choice, based on FCP-4 9.4.2.9 and the libiscsi tests).
    fn offered(wanted: u64, offer: &Offer<'_>) -> Result<u64, ModelResponse> {
        let len = offer.data_out.len();
        if len >= wanted as usize * BLOCK {
            return Ok(wanted);
        }
        match len % BLOCK {
            0 => Ok((len / BLOCK) as u64),
            _ => Err(ModelResponse::Check(vec![BUFFER])),
        }
    }

    fn write(&mut self, extent: Extent, offer: &Offer<'_>, how: fn(u8, u8) -> u8) -> ModelResponse {
        if let Some(refusal) = Self::refuses(extent) {
            return refusal;
        }
        let blocks = match Self::offered(extent.blocks(), offer) {
            Ok(blocks) => blocks,
            Err(refusal) => return refusal,
        };
        let old = &mut self.bytes[extent.bytes(blocks)];
        for (old, new) in old.iter_mut().zip(offer.data_out) {
            *old = how(*old, *new);
        }
        ModelResponse::good(extent.bytes(extent.blocks()).len())
    }

    fn verify(&self, extent: Extent, compare: u8, offer: &Offer<'_>) -> ModelResponse {
        if compare == 2 {
            return ModelResponse::Check(vec![INVALID_FIELD, OUT_OF_RANGE]);
        }
        if let Some(refusal) = Self::refuses(extent) {
            return refusal;
        }
        let wanted = match compare {
            0 => return ModelResponse::good(0),
            1 => extent.blocks(),
            _ => extent.blocks().min(1),
        };
        let offered = match Self::offered(wanted, offer) {
            Ok(blocks) => blocks,
            Err(refusal) => return refusal,
        };
        let blocks = match (compare, offered) {
            (1, offered) => offered,
            (_, 0) => 0,
            (_, _) => extent.blocks(),
        };
        let medium = &self.bytes[extent.bytes(blocks)];
        let data = offer.data_out.iter();
        let difference = match compare {
            1 => medium.iter().zip(data).position(|(a, b)| a != b),
            _ => medium
                .iter()
                .zip(data.take(BLOCK).cycle())
                .position(|(a, b)| a != b),
        };
        match difference {
            Some(at) => ModelResponse::Miscompare(at as u64),
            None => ModelResponse::good(wanted as usize * BLOCK),
        }
    }

    fn compare_and_write(&mut self, extent: Extent, offer: &Offer<'_>) -> ModelResponse {
        let blocks = extent.blocks();
        let mut codes = Vec::new();
        if !extent.is_in_range() {
            codes.push(OUT_OF_RANGE);
        }
        // Data with a length of zero blocks is rejected, because the initiator probably used a
        // length that doesn't fit in the field (this is our choice).
        if blocks > MAX_COMPARE || (blocks == 0 && !offer.data_out.is_empty()) {
            codes.push(INVALID_FIELD);
        }
        if !codes.is_empty() {
            return ModelResponse::Check(codes);
        }
        let len = blocks as usize * BLOCK;
        if blocks > 0 && offer.data_out.len() != 2 * len {
            return ModelResponse::Check(vec![BUFFER]);
        }
        let (expected, new) = offer.data_out.split_at(len);
        let old = &mut self.bytes[extent.bytes(blocks)];
        match old.iter().zip(expected).position(|(a, b)| a != b) {
            Some(at) => ModelResponse::Miscompare(at as u64),
            None => {
                old.copy_from_slice(new);
                ModelResponse::good(2 * len)
            }
        }
    }

    fn write_same(&mut self, extent: Extent, flags: SameFlags, offer: &Offer<'_>) -> ModelResponse {
        let mut codes = Vec::new();
        if !extent.is_in_range() {
            codes.push(OUT_OF_RANGE);
        }
        // WSNZ is set, so a length of zero doesn't mean all blocks.
        if extent.blocks() == 0 || extent.blocks() > MAX_SAME {
            codes.push(INVALID_FIELD);
        }
        if !codes.is_empty() {
            return ModelResponse::Check(codes);
        }
        let blocks = &mut self.bytes[extent.bytes(extent.blocks())];
        if flags.no_data {
            blocks.fill(0);
            return ModelResponse::good(0);
        }
        if offer.data_out.len() != BLOCK {
            return ModelResponse::Check(vec![BUFFER]);
        }
        for block in blocks.chunks_mut(BLOCK) {
            block.copy_from_slice(offer.data_out);
        }
        ModelResponse::good(BLOCK)
    }

    /// In this test, the disk can unmap any block, and unmapped blocks are zero (LBPRZ).
    fn unmap(&mut self, extents: &[Extent], offer: &Offer<'_>) -> ModelResponse {
        let len = unmap_list(extents).len();
        if offer.data_out.len() < len {
            return ModelResponse::Check(vec![BUFFER]);
        }
        let mut codes = Vec::new();
        let total: u64 = extents.iter().map(|extent| extent.blocks()).sum();
        if extents.len() > MAX_DESCRIPTORS || total > MAX_UNMAP {
            codes.push(INVALID_PARAMETER);
        }
        if extents.iter().any(|extent| !extent.is_in_range()) {
            codes.push(OUT_OF_RANGE);
        }
        if !codes.is_empty() {
            return ModelResponse::Check(codes);
        }
        for extent in extents {
            self.bytes[extent.bytes(extent.blocks())].fill(0);
        }
        ModelResponse::good(len)
    }
}

/// Creates the parameter list for UNMAP (SBC-3 5.28.2).
pub(super) fn unmap_list(extents: &[Extent]) -> Vec<u8> {
    let descriptors = 16 * extents.len() as u16;
    let mut list = (descriptors + 6).to_be_bytes().to_vec();
    list.extend(descriptors.to_be_bytes());
    list.extend([0; 4]);
    for extent in extents {
        list.extend(extent.lba().to_be_bytes());
        list.extend((extent.blocks() as u32).to_be_bytes());
        list.extend([0; 4]);
    }
    list
}

/// Persistent reservations (SPC-4 5.13) and RESERVE (SPC-2 5.5).
impl Disk {
    fn key(&self, nexus: usize) -> Option<u64> {
        let mut all = self.registered.iter();
        all.find_map(|(of, key)| (*of == nexus).then_some(*key))
    }

    fn is_holder(&self, nexus: usize) -> bool {
        let is_registered = self.key(nexus).is_some();
        self.held
            .is_some_and(|(maker, kind)| is_registered && (maker == nexus || matches!(kind, 7 | 8)))
    }

    /// Returns true if a command is not allowed because of a reservation (SPC-4 table 66, SBC-3
    /// table 13, SPC-2 table 10).
    fn conflicts(&self, nexus: usize, command: &Command) -> bool {
        if self.reserved.is_some()
            && matches!(command, Command::ReserveIn(_) | Command::ReserveOut(_))
        {
            return true;
        }
        if self.reserved.is_some_and(|holder| holder != nexus) {
            use Command::{Release, ReportLuns, RequestSense};
            // RELEASE is not an error if the nexus doesn't hold the reservation, and REPORT LUNS is
            // handled by the target.
            return !matches!(command, Release | ReportLuns(_) | RequestSense);
        }
        let Some((_, kind)) = self.held else {
            return false;
        };
        let shares = self.key(nexus).is_some() && matches!(kind, 5..=8);
        if self.is_holder(nexus) || shares {
            return false;
        }
        let exclusive = matches!(kind, 3 | 6 | 8);
        match command {
            Command::Write(_)
            | Command::WriteAndVerify(..)
            | Command::CompareAndWrite(_)
            | Command::OrWrite(_)
            | Command::WriteSame(..)
            | Command::Unmap(_)
            | Command::SynchronizeCache(_)
            | Command::StartStop(false) => true,
            Command::Read(_) | Command::Verify(..) => exclusive,
            _ => false,
        }
    }

    /// READ KEYS and READ RESERVATION.
    fn reservations(&self, action: u8) -> Vec<u8> {
        let mut entries = Vec::new();
        match (action, self.held) {
            (0, _) => entries.extend(
                self.registered
                    .iter()
                    .flat_map(|(_, key)| key.to_be_bytes()),
            ),
            (_, Some((maker, kind))) => {
                // If there is no single holder, there is no key.
                let key = match kind {
                    7 | 8 => 0,
                    _ => self.key(maker).unwrap_or(0),
                };
                entries.extend(key.to_be_bytes());
                entries.extend([0, 0, 0, 0, 0, kind, 0, 0]);
            }
            (_, None) => {}
        }
        let mut data = self.generation.to_be_bytes().to_vec();
        data.extend((entries.len() as u32).to_be_bytes());
        data.extend(entries);
        data
    }

    fn reserve_out(&mut self, nexus: usize, out: &ReserveOut, offer: &Offer<'_>) -> ModelResponse {
        let is_type = matches!(out.kind, 1 | 3 | 5..=8);
        if matches!(out.action, 1 | 4 | 5) && !is_type {
            return ModelResponse::Check(vec![INVALID_FIELD]);
        }
        if offer.data_out.len() < RESERVE_LIST {
            return ModelResponse::Check(vec![BUFFER, LIST_LENGTH]);
        }
        let (key, new) = (u64::from(out.key), u64::from(out.action_key));
        let registers = matches!(out.action, 0 | 6);
        let known = self.key(nexus);
        let is_proved = match out.action {
            6 => true,
            0 => known.unwrap_or(0) == key,
            _ => known == Some(key),
        };
        if !is_proved {
            return ModelResponse::Conflict;
        }
        let outcome = match out.action {
            _ if registers => self.register(nexus, new),
            1 => self.reserve(nexus, out.kind),
            2 => self.release(nexus, out.kind),
            3 => self.clear(nexus),
            _ => self.preempt(nexus, new, out.kind),
        };
        outcome.unwrap_or(ModelResponse::good(RESERVE_LIST))
    }

    /// REGISTER, and REGISTER AND IGNORE EXISTING KEY: SPC-4 5.13.7.
    fn register(&mut self, nexus: usize, key: u64) -> Option<ModelResponse> {
        match (self.key(nexus), key) {
            // There is nothing to remove.
            (None, 0) => return None,
            (None, key) => self.registered.push((nexus, key)),
            (Some(_), 0) => self.unregister(nexus),
            (Some(_), key) => {
                let mut all = self.registered.iter_mut();
                all.find(|(of, _)| *of == nexus).unwrap().1 = key;
            }
        }
        self.generation += 1;
        None
    }

    /// SPC-4 5.13.11.2.1, and 5.13.11.2.3 for the reservation.
    fn unregister(&mut self, nexus: usize) {
        self.registered.retain(|(of, _)| *of != nexus);
        let Some((maker, kind)) = self.held else {
            return;
        };
        let ends = match kind {
            7 | 8 => self.registered.is_empty(),
            _ => maker == nexus,
        };
        if ends {
            self.held = None;
            if kind >= 5 {
                self.raise_registered(RESERVATIONS_RELEASED, nexus);
            }
        }
    }

    /// Sets a condition for all registered nexuses except one.
    fn raise_registered(&mut self, code: Code, but: usize) {
        let registered = self.registered.clone();
        self.raise(code, |nexus| {
            nexus != but && registered.iter().any(|(of, _)| *of == nexus)
        });
    }

    /// SPC-4 5.13.9.
    fn reserve(&mut self, nexus: usize, kind: u8) -> Option<ModelResponse> {
        match self.held {
            None => self.held = Some((nexus, kind)),
            Some((_, held)) if held == kind && self.is_holder(nexus) => {}
            Some(_) => return Some(ModelResponse::Conflict),
        }
        None
    }

    /// SPC-4 5.13.11.2.2.
    fn release(&mut self, nexus: usize, kind: u8) -> Option<ModelResponse> {
        let (_, held) = self.held.filter(|_| self.is_holder(nexus))?;
        if held != kind {
            return Some(ModelResponse::Check(vec![INVALID_RELEASE]));
        }
        self.held = None;
        if kind >= 5 {
            self.raise_registered(RESERVATIONS_RELEASED, nexus);
        }
        None
    }

    /// SPC-4 5.13.11.2.5.
    fn clear(&mut self, nexus: usize) -> Option<ModelResponse> {
        self.raise_registered(RESERVATIONS_PREEMPTED, nexus);
        self.registered.clear();
        self.held = None;
        self.generation += 1;
        None
    }

    /// PREEMPT, and PREEMPT AND ABORT: SPC-4 5.13.11.2.4. There are no pending commands from other
    /// nexuses here.
    fn preempt(&mut self, nexus: usize, key: u64, kind: u8) -> Option<ModelResponse> {
        let is_of_all = self.held.is_some_and(|(_, kind)| matches!(kind, 7 | 8));
        if key == 0 && !is_of_all {
            return Some(ModelResponse::Check(vec![INVALID_PARAMETER]));
        }
        let takes = match self.held {
            None => false,
            Some(_) if is_of_all => key == 0,
            Some((maker, _)) => self.key(maker) == Some(key),
        };
        let is_removed = |(of, k): &(usize, u64)| match takes {
            true => *of != nexus && (is_of_all || *k == key),
            false => *k == key,
        };
        let removed: Vec<_> = self.registered.iter().copied().filter(is_removed).collect();
        if removed.is_empty() && !takes {
            return Some(ModelResponse::Conflict);
        }
        self.registered.retain(|one| !removed.contains(one));
        self.generation += 1;
        let is_notified = |of: usize| of != nexus && removed.iter().any(|(one, _)| *one == of);
        self.raise(REGISTRATIONS_PREEMPTED, is_notified);
        match self.held {
            Some((_, old)) if takes => {
                self.held = Some((nexus, kind));
                if old != kind {
                    self.raise_registered(RESERVATIONS_RELEASED, nexus);
                }
            }
            // The last registrant has preempted itself. If there were other registrants, it doesn't
            // hold the reservation any more.
            Some((maker, kind)) => {
                let is_left = match kind {
                    7 | 8 => !self.registered.is_empty(),
                    _ => self.key(maker).is_some(),
                };
                self.held = self.held.filter(|_| is_left);
            }
            None => {}
        }
        None
    }
}

/// Size of the PERSISTENT RESERVE OUT parameter list.
pub(super) const RESERVE_LIST: usize = 24;
