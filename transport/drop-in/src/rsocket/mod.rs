//! rsockets: sockets over RDMA, with the calls and the protocol of rdma-core's
//! (`docs/rsocket`, `rsocket(7)`).
//!
//! They are built on the calls of this library, as a program would be. A socket's number is that of
//! a descriptor of its own: the event channel of a stream's identifier, the UDP socket of a datagram
//! socket. So it is no other file's, and programs use both kinds side by side in `rpoll`.
//!
//! | module | what it has |
//! | --- | --- |
//! | `wire` | the bytes of the protocol |
//! | `stream` | the state machine of a stream, without I/O |
//! | `link` | a stream with its queue pair and its memory |
//! | `iomap` | memory that the other end writes to |
//! | `connection` | a stream socket: listening, connecting, accepting |
//! | `datagram`, `datagram_wire` | a datagram socket, and the bytes of its protocol |
//! | `transfer` | sending and receiving on one |
//! | `socket` | sockets by number; how threads wait |
//! | `poll` | `rpoll` and `rselect` |
//! | `options`, `sockopt` | options, and how programs set them |
//! | `keep_alive` | the thread that tries idle connections |
//! | `ident`, `queue` | what a socket owns of the rest of this library |
//! | `calls` | the exported calls |

mod calls;
mod connection;
mod datagram;
mod datagram_wire;
mod ident;
mod iomap;
mod keep_alive;
mod link;
mod options;
mod poll;
mod queue;
mod socket;
mod sockopt;
mod stream;
mod transfer;
mod wire;

pub(crate) use self::calls::*;
