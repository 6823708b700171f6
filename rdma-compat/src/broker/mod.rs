//! Sharing an address between several processes.
//!
//! Programs fork, and `mpirun` starts several processes. All of them have a device with the same
//! address, but UDP port 4791 exists only once. So each process is one of the device's workers
//! (`riser_transport::roce::steer`): the low bits of its queue pair numbers and communication IDs
//! contain its slot, which the kernel uses to select the socket for a packet. A small process,
//! their broker, has control of everything that the processes have in common. There is one instance
//! for each user and address. It is started by the first process (`launch`), and exits after the
//! last one.
//!
//! - **Connections.** Each process is a client of the broker: it has a Unix connection (`place`),
//!   over which it receives the socket of its slot (`message`). The kernel closes it when the
//!   process exits for any reason, and the broker then frees the slot and the ports of the process.
//!   If the broker is killed, its processes lose their device, as if its interface had been
//!   deleted.
//! - **Sockets.** The kernel numbers the sockets that share a port, so if one of them were closed,
//!   another socket would be moved to its position. To avoid this, the broker keeps all of them
//!   open.
//! - **Slot 0** belongs to the broker. It receives incoming connection requests, which do not
//!   contain any of our IDs, and responses of subnet administrators, and passes them to the right
//!   process (`router`). Everything else is delivered by the kernel directly to its process.
//! - **Ports** of the RDMA CM are allocated by the broker (`ports`). Requests for ports are
//!   synchronous, so that a remote client which learns of a listener can connect immediately.
//!
//! Note that a stopped process does not affect other processes: packets for it are dropped, like in
//! a full socket.
//!
//! An address can only be shared by processes of the same user, with the same library version, in
//! the same network namespace. For all other processes, the address is in use.
//!
//! Not implemented: listeners with bare service IDs. Currently, such requests are handled by the
//! process in the lowest slot.

mod launch;
mod message;
mod place;
mod ports;
mod router;
mod serve;
pub(crate) mod share;

pub(crate) use ports::Port;
#[cfg(test)]
pub(crate) use router::slot_of_response;

/// Number of bits of a queue pair number that contain the slot.
pub(crate) const BITS: u8 = 5;

/// Number of slots. The first slot belongs to the broker.
const SLOTS: u8 = 1 << BITS;
