//! Services of an RDMA fabric, as machines without I/O and the programs that run them.
