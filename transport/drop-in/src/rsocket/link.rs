//! A stream with its queue pair and its memory.

use std::ffi::c_int;
use std::mem::zeroed;
use std::ops::Range;
use std::ptr;
use std::slice;

use riser_rdma_core_sys::bindings::*;

use super::ident::{Ident, checked};
use super::iomap::Maps;
use super::queue::{Buffer, Completions, drain};
use super::stream::{Control, Place, Remote, Sizes, Stream, TARGETS, Targets, Work, Write};
use super::wire::{ConnData, IOMAP_LEN, Iomap, Message, SEGMENT_LEN, Segment};
use crate::cm::{rdma_create_qp, rdma_destroy_qp};
use crate::errno::Errno;
use crate::post::{post_recv, post_send};

/// Room for inline data that each queue pair has: an entry of a list is always sent inline.
const LEAST_INLINE: u32 = IOMAP_LEN as u32;

/// A queue pair with its memory, and the stream once the other end's data are known.
pub(super) struct Link {
    id: *mut rdma_cm_id,
    qp: *mut ibv_qp,
    pub(super) completions: Completions,
    sizes: Sizes,
    send: Buffer,
    recv: Buffer,
    list: List,
    pub(super) maps: Maps,
    stream: Option<Stream>,
}

// SAFETY: the library's calls may be made in any thread.
unsafe impl Send for Link {}

/// Memory that the other end writes: the target list, and behind it the list of iomaps.
struct List(Buffer);

impl Targets for List {
    fn take(&mut self, index: usize) -> Segment {
        let mut entry = [0; SEGMENT_LEN];
        self.0.memory().read(index * SEGMENT_LEN, &mut entry);
        let segment = Segment::from_entry(&entry);
        if segment.length > 0 {
            self.0
                .memory()
                .write(index * SEGMENT_LEN, &[0; SEGMENT_LEN]);
        }
        segment
    }
}

impl List {
    fn iomap(&self, index: usize) -> Iomap {
        let mut entry = [0; IOMAP_LEN];
        let at = TARGETS * SEGMENT_LEN + index * IOMAP_LEN;
        self.0.memory().read(at, &mut entry);
        Iomap::from_entry(&entry)
    }
}

impl Link {
    /// Makes the queue pair and the memory of an identifier that has a device.
    ///
    /// # Errors
    /// Those of `rdma_create_qp(3)` and `ibv_reg_mr(3)`.
    pub(super) fn new(ident: &Ident, sizes: Sizes) -> Result<Self, Errno> {
        let entries = u32::from(sizes.send_queue) + u32::from(sizes.recv_queue);
        // SAFETY: the identifier is alive, and its device is open.
        let completions = unsafe { Completions::new(ident.verbs(), entries) }?;
        // SAFETY: all-zero bytes are valid for this plain C structure.
        let mut attr: ibv_qp_init_attr = unsafe { zeroed() };
        attr.send_cq = completions.cq();
        attr.recv_cq = completions.cq();
        attr.qp_type = IBV_QPT_RC;
        attr.sq_sig_all = 1;
        attr.cap = ibv_qp_cap {
            max_send_wr: sizes.send_queue.into(),
            max_recv_wr: sizes.recv_queue.into(),
            // A ring's bytes may be in two pieces.
            max_send_sge: 2,
            max_recv_sge: 1,
            max_inline_data: sizes.inline.max(LEAST_INLINE),
        };
        let id = ident.id();
        // SAFETY: the identifier is alive, and so are the attributes.
        unsafe { checked(rdma_create_qp(id, ptr::null_mut(), &raw mut attr)) }?;
        let guard = QueuePair(id);
        let list = TARGETS * SEGMENT_LEN + usize::from(sizes.iomaps) * IOMAP_LEN;
        let ours = IBV_ACCESS_LOCAL_WRITE;
        let theirs = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
        // SAFETY: the queue pair has given the identifier a protection domain.
        let (send, recv, list) = unsafe {
            let pd = (*id).pd;
            (
                Buffer::new(pd, sizes.send_buffer as usize, ours)?,
                Buffer::new(pd, sizes.recv_buffer as usize, theirs)?,
                List(Buffer::new(pd, list, theirs)?),
            )
        };
        std::mem::forget(guard);
        let link = Self {
            id,
            // SAFETY: the identifier is alive.
            qp: unsafe { (*id).qp },
            completions,
            sizes,
            send,
            recv,
            list,
            maps: Maps::default(),
            stream: None,
        };
        for _ in 0..sizes.recv_queue {
            link.post_recv()?;
        }
        Ok(link)
    }

    /// Connection data for the other end.
    pub(super) fn conn_data(&self) -> ConnData {
        ConnData {
            is_big_endian: cfg!(target_endian = "big"),
            credits: self.sizes.recv_queue,
            iomaps: self.sizes.iomaps,
            targets: Segment {
                addr: self.list.0.memory().addr(),
                key: self.list.0.rkey(),
                length: TARGETS as u32,
            },
            data: Segment {
                addr: self.recv.memory().addr(),
                key: self.recv.rkey(),
                length: self.sizes.recv_buffer / 2,
            },
        }
    }

    /// Begins the stream, with the other end's connection data.
    pub(super) fn begin(&mut self, peer: ConnData) {
        let buffer = Remote {
            addr: self.recv.memory().addr(),
            key: self.recv.rkey(),
        };
        self.stream = Some(Stream::new(self.sizes, buffer, peer));
    }

    /// The protection domain.
    pub(super) fn pd(&self) -> *mut ibv_pd {
        // SAFETY: the queue pair is alive.
        unsafe { (*self.qp).pd }
    }

    /// The stream.
    ///
    /// # Panics
    /// Before it has begun.
    pub(super) fn stream(&mut self) -> &mut Stream {
        self.stream.as_mut().expect("the link is connected")
    }

    /// Data can be sent now.
    pub(super) fn can_write(&mut self) -> bool {
        let stream = self.stream.as_mut().expect("the link is connected");
        stream.can_write(&mut self.list)
    }

    fn post_recv(&self) -> Result<(), Errno> {
        // SAFETY: all-zero bytes are valid: a request without memory.
        let mut wr: ibv_recv_wr = unsafe { zeroed() };
        wr.wr_id = Work::Receive.id();
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is alive, and so is the request.
        match unsafe { post_recv(self.qp, &raw mut wr, &raw mut bad) } {
            0 => Ok(()),
            errno => Err(Errno(errno)),
        }
    }

    /// Handles the completions that have come, and posts the control messages that are due.
    /// Answers whether there were any.
    pub(super) fn progress(&mut self) -> bool {
        let is_changed = drain(self.completions.entries(), || {
            let stream = self.stream.as_mut().expect("the link is connected");
            let mut receives = 0;
            let n = self.completions.poll(|wc| {
                receives += usize::from(handle(stream, wc));
            });
            for _ in 0..receives {
                if let Err(Errno(errno)) = self.post_recv() {
                    self.stream().fail(errno);
                }
            }
            n
        });
        self.post_controls();
        is_changed
    }

    /// Posts the control messages that are due.
    pub(super) fn post_controls(&mut self) {
        while let Some(control) = self.stream().poll_control() {
            let Control {
                message,
                entry,
                work,
            } = control;
            let (remote, bytes) = match &entry {
                Some((remote, bytes)) => (*remote, &bytes[..]),
                None => (Remote { addr: 0, key: 0 }, &[][..]),
            };
            let pieces = [sge(bytes), sge(&[])];
            self.post(&pieces[..1], true, remote, Some(message), work);
        }
    }

    /// Sends a write without bytes and without a message.
    pub(super) fn keep_alive(&mut self) {
        if let Some(work) = self.stream().plan_keep_alive() {
            self.post(&[], false, Remote { addr: 0, key: 0 }, None, work);
        }
    }

    /// Sends bytes of a program's, as many as there is room for now.
    pub(super) fn send(&mut self, bytes: &[u8], max: usize) -> usize {
        let stream = self.stream.as_mut().expect("the link is connected");
        let max = max.min(bytes.len());
        let Some(write) = stream.plan_write(max, &mut self.list) else {
            return 0;
        };
        self.post_write(&write, bytes);
        write.length as usize
    }

    /// Writes bytes of a program's into an iomap of the other end's, as many as there is room for.
    ///
    /// # Errors
    /// `ENXIO` where the other end has mapped nothing at the offset.
    pub(super) fn send_direct(
        &mut self,
        bytes: &[u8],
        max: usize,
        offset: u64,
    ) -> Result<usize, Errno> {
        let find = |i| {
            let Iomap {
                offset: start,
                segment,
            } = self.list.iomap(i);
            let within = offset.checked_sub(start)?;
            let left = u64::from(segment.length).checked_sub(within)?;
            (left > 0).then_some((segment, within, left))
        };
        let found = (0..usize::from(self.sizes.iomaps)).find_map(find);
        let (segment, within, left) = found.ok_or(Errno(libc::ENXIO))?;
        let remote = Remote {
            addr: segment.addr.wrapping_add(within),
            key: segment.key,
        };
        let max = max
            .min(bytes.len())
            .min(usize::try_from(left).unwrap_or(usize::MAX));
        let Some(write) = self.stream().plan_direct(max, remote) else {
            return Ok(0);
        };
        self.post_write(&write, bytes);
        Ok(write.length as usize)
    }

    /// Tells the other end of the iomaps that it has not heard of. Answers whether it has heard of
    /// all of them.
    pub(super) fn announce_maps(&mut self) -> bool {
        while let Some((index, map)) = self.maps.unannounced() {
            let Some((write, bytes)) = self.stream().plan_iomap(index, map) else {
                return false;
            };
            self.maps.set_announced(index);
            self.post_write(&write, &bytes);
        }
        true
    }

    /// Posts a planned write of the first bytes of `bytes`.
    fn post_write(&mut self, write: &Write, bytes: &[u8]) {
        let bytes = &bytes[..write.length as usize];
        let (pieces, is_inline) = match &write.place {
            Place::Inline => ([sge(bytes), sge(&[])], true),
            Place::Buffer([first, second]) => {
                let (head, tail) = bytes.split_at(first.len());
                self.send.memory().write(first.start, head);
                self.send.memory().write(second.start, tail);
                ([self.piece(first), self.piece(second)], false)
            }
        };
        let count = if pieces[1].length == 0 { 1 } else { 2 };
        self.post(
            &pieces[..count],
            is_inline,
            write.remote,
            write.message,
            write.work,
        );
    }

    fn piece(&self, range: &Range<usize>) -> ibv_sge {
        ibv_sge {
            addr: self.send.memory().addr() + range.start as u64,
            length: range.len() as u32,
            lkey: self.send.lkey(),
        }
    }

    fn post(
        &mut self,
        pieces: &[ibv_sge],
        is_inline: bool,
        remote: Remote,
        message: Option<Message>,
        work: Work,
    ) {
        // SAFETY: all-zero bytes are valid for this plain C structure.
        let mut wr: ibv_send_wr = unsafe { zeroed() };
        wr.wr_id = work.id();
        wr.sg_list = pieces.as_ptr().cast_mut();
        wr.num_sge = pieces.len() as c_int;
        wr.opcode = IBV_WR_RDMA_WRITE;
        wr.send_flags = if is_inline { IBV_SEND_INLINE } else { 0 };
        wr.wr.rdma.remote_addr = remote.addr;
        wr.wr.rdma.rkey = remote.key;
        if let Some(message) = message {
            wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
            wr.__bindgen_anon_1.imm_data = message.encode().to_be();
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is alive, and so are the request and its memory.
        let errno = unsafe { post_send(self.qp, &raw mut wr, &raw mut bad) };
        if errno != 0 {
            self.stream().fail(errno);
        }
    }

    /// Copies unread bytes to a program, and gives their room back unless it only looks.
    pub(super) fn receive(&mut self, into: &mut [u8], is_peek: bool) -> usize {
        let stream = self.stream.as_mut().expect("the link is connected");
        let [first, second] = stream.plan_read(into.len());
        let length = first.len() + second.len();
        let (head, tail) = into[..length].split_at_mut(first.len());
        self.recv.memory().read(first.start, head);
        self.recv.memory().read(second.start, tail);
        if !is_peek && length > 0 {
            stream.consume(length);
            self.post_controls();
        }
        length
    }
}

/// Bytes of an inline write.
fn sge(bytes: &[u8]) -> ibv_sge {
    ibv_sge {
        addr: bytes.as_ptr().expose_provenance() as u64,
        length: bytes.len() as u32,
        lkey: 0,
    }
}

/// Gives the stream a completion. Answers whether it has used a receive, which is to be replaced.
fn handle(stream: &mut Stream, wc: &ibv_wc) -> bool {
    let work = Work::of(wc.wr_id);
    let is_good = wc.status == IBV_WC_SUCCESS;
    if work != Work::Receive {
        if !is_good {
            // Flushed requests say nothing about the reason; the first one does.
            match wc.status {
                IBV_WC_WR_FLUSH_ERR => stream.handle_flushed(),
                IBV_WC_RETRY_EXC_ERR | IBV_WC_RNR_RETRY_EXC_ERR => stream.fail(libc::ETIMEDOUT),
                _ => stream.fail(libc::EIO),
            }
        }
        stream.handle_sent(work);
        return false;
    }
    if !is_good {
        stream.handle_flushed();
        return false;
    }
    if wc.wc_flags & IBV_WC_WITH_IMM == 0 {
        // Something else than an rsocket is at the other end.
        stream.fail(libc::EPROTO);
        return false;
    }
    // SAFETY: the flag says that this member is meant.
    let imm = u32::from_be(unsafe { wc.__bindgen_anon_1.imm_data });
    stream.handle_message(Message::decode(imm));
    true
}

/// Destroys the queue pair of an identifier.
struct QueuePair(*mut rdma_cm_id);

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: the identifier is alive.
        unsafe { rdma_destroy_qp(self.0) };
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Its memory and its completion queue go after it.
        drop(QueuePair(self.id));
    }
}

/// The bytes of a program's buffer.
///
/// # Errors
/// `EFAULT` for a null pointer with a length, and for a length that no buffer has.
///
/// # Safety
/// The pointer is null, or `length` bytes stay valid for `'a`.
pub(super) unsafe fn bytes<'a>(at: *const u8, length: usize) -> Result<&'a [u8], Errno> {
    match (at.is_null(), length) {
        (_, 0) => Ok(&[]),
        (false, length) if isize::try_from(length).is_ok() => {
            // SAFETY: as the caller promises.
            Ok(unsafe { slice::from_raw_parts(at, length) })
        }
        _ => Err(Errno(libc::EFAULT)),
    }
}

/// As [`bytes`], for a buffer that is written.
///
/// # Errors
/// As there.
///
/// # Safety
/// As there; no other thread uses the bytes.
pub(super) unsafe fn bytes_mut<'a>(at: *mut u8, length: usize) -> Result<&'a mut [u8], Errno> {
    match (at.is_null(), length) {
        (_, 0) => Ok(&mut []),
        (false, length) if isize::try_from(length).is_ok() => {
            // SAFETY: as the caller promises.
            Ok(unsafe { slice::from_raw_parts_mut(at, length) })
        }
        _ => Err(Errno(libc::EFAULT)),
    }
}
