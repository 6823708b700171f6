//! Tests for INQUIRY, VPD, REPORT LUNS, READ CAPACITY, and LUNs without a logical unit.

use super::{A, Rig, config};
use crate::config::{BlockSize, Provisioning};
use crate::data::designator::Naa;
use crate::device_server::Request;
use crate::device_server::respond_absent;
use crate::lun::LunId;
use crate::nexus::{Nexus, NexusId, PortName, TargetPort};
use crate::opcode::Opcode;
use crate::step::{Expected, Residual, Status, TaskAttribute};

#[test]
fn standard_inquiry() {
    // INQUIRY, allocation length 255.
    let data = Rig::new().send(&[0x12, 0, 0, 0, 0xff, 0]).good().data;
    assert_eq!(data.len(), 96);
    let head = [0x00, 0x00, 0x06, 0x12, 91, 0x00, 0x10, 0x02];
    assert_eq!(data[..8], head, "direct access, SPC-4, HISUP, CMDQUE");
    assert_eq!(&data[8..36], b"RISER   DISK            0001");
    // Version descriptors: SAM-5, SPC-4, SBC-3, SRP.
    assert_eq!(
        data[58..68],
        [0x00, 0xa0, 0x04, 0x60, 0x04, 0xc0, 0x09, 0x40, 0, 0]
    );
}

#[test]
fn inquiry_respects_allocation_length() {
    let mut rig = Rig::new();
    for len in [0_u16, 1, 5, 36, 95, 96, 97, 511, 512] {
        let [high, low] = len.to_be_bytes();
        let outcome = rig.send(&[0x12, 0, 0, high, low, 0]).good();
        assert_eq!(outcome.data.len(), usize::from(len.min(96)));
    }
}

#[test]
fn page_code_requires_evpd() {
    let mut rig = Rig::new();
    let outcome = rig.send(&[0x12, 0, 0x83, 0, 0xff, 0]);
    assert_eq!(outcome.check(), (5, 0x24, 0));
    assert_eq!(outcome.cdb_pointer(), (2, Some(7)));
    assert_eq!(rig.send(&[0x12, 1, 0x84, 0, 0xff, 0]).check(), (5, 0x24, 0));
    // CMDDT is obsolete.
    assert_eq!(
        rig.send(&[0x12, 2, 0, 0, 0xff, 0]).cdb_pointer(),
        (1, Some(1))
    );
}

fn vpd(rig: &mut Rig, page: u8) -> Vec<u8> {
    let data = rig.send(&[0x12, 0x01, page, 0x10, 0x00, 0]).good().data;
    assert_eq!(data[..2], [0, page]);
    let len = usize::from(u16::from_be_bytes([data[2], data[3]]));
    assert_eq!(data.len(), 4 + len);
    data[4..].to_vec()
}

#[test]
fn supported_pages_are_sorted_and_readable() {
    let mut rig = Rig::new();
    let pages = vpd(&mut rig, 0x00);
    assert_eq!(pages, [0x00, 0x80, 0x83, 0x86, 0xb0, 0xb1, 0xb2]);
    for page in pages {
        vpd(&mut rig, page);
    }
    assert_eq!(vpd(&mut rig, 0x80), b"S1");
}

#[test]
fn device_identification_on_srp() {
    let page = vpd(&mut Rig::new(), 0x83);
    let mut expected = vec![
        0x01, 0x03, 0, 8, // NAA, binary, logical unit
        0x31, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, // locally assigned
        0x02, 0x01, 0, 15, // T10 vendor ID, ASCII
    ];
    expected.extend(b"RISER   DISK S1");
    expected.extend([0x41, 0x94, 0, 4, 0, 0, 0, 1]); // SRP, relative target port 1
    expected.extend([0x41, 0x95, 0, 4, 0, 0, 0, 2]); // SRP, target port group 2
    expected.extend([0x41, 0x92, 0, 16]); // SRP, EUI-64 based 16 bytes
    expected.extend(b"target-port-name");
    assert_eq!(page, expected);
}

#[test]
fn device_identification_on_iscsi() {
    let mut config = config(BlockSize::B512, 8);
    config.identity.naa = Naa::RegisteredExtended {
        company: 0x00_0e1e,
        vendor_specific: 0x1_2345_6789,
        extension: 0x0102_0304_0506_0708,
    };
    let mut rig = Rig::with(config);
    let nexus = NexusId(3);
    let name = |text: &str| PortName::Iscsi(text.into());
    rig.lu.add_nexus(
        nexus,
        Nexus {
            initiator: name("iqn.a:i,i,0x80123456789a"),
            target: TargetPort {
                name: name("iqn.a:t,t,0x0001"),
                relative_id: 1,
                group: 1,
            },
        },
    );
    let page = rig
        .run(nexus, &[0x12, 1, 0x83, 0x10, 0, 0], &[], 4096)
        .good()
        .data;
    let naa = [
        0x01, 0x03, 0, 16, // NAA, binary
        0x60, 0x00, 0xe1, 0xe1, 0x23, 0x45, 0x67, 0x89, // 6, company, vendor specific
        1, 2, 3, 4, 5, 6, 7, 8,
    ];
    assert_eq!(page[4..24], naa);
    let port = [&[0x53, 0x98, 0, 20][..], b"iqn.a:t,t,0x0001\0\0\0\0"].concat();
    assert!(page.windows(port.len()).any(|window| window == port));
    let device = [&[0x53, 0xa8, 0, 8][..], b"iqn.a:t\0"].concat();
    assert!(page.ends_with(&device));
    // The version descriptors contain iSCSI instead of SRP.
    let data = rig.run(nexus, &[0x12, 0, 0, 0, 96, 0], &[], 96).good().data;
    assert_eq!(data[64..66], [0x09, 0x60]);
}

#[test]
fn block_limits_and_provisioning() {
    let mut rig = Rig::new();
    let limits = vpd(&mut rig, 0xb0);
    assert_eq!(limits.len(), 0x3c);
    assert_eq!(limits[0], 1, "WSNZ");
    assert_eq!(limits[2..4], [0, 8], "4096 physical");
    assert_eq!(limits[4..8], [0, 0, 0, 128], "64 KiB in blocks");
    assert_eq!(limits[8..12], [0, 0, 0, 128], "limited to the maximum");
    assert_eq!(limits[16..20], [0, 0, 0, 100], "MAXIMUM UNMAP LBA COUNT");
    assert_eq!(limits[20..24], [0, 0, 0, 4]);
    assert_eq!(
        limits[24..32],
        [0, 0, 0, 1, 0x80, 0, 0, 0],
        "granularity, UGAVALID"
    );
    assert_eq!(limits[32..40], [0, 0, 0, 0, 0, 0, 0, 64]);
    assert_eq!(vpd(&mut rig, 0xb2), [0, 0xe4, 2, 0]);
    assert_eq!(vpd(&mut rig, 0xb1)[..2], [0, 1], "solid state");
    assert_eq!(vpd(&mut rig, 0x86)[1], 7, "all three task attributes");

    let mut thick = config(BlockSize::B4096, 16);
    thick.provisioning = Provisioning::Thick;
    let mut rig = Rig::with(thick);
    assert!(vpd(&mut rig, 0xb0)[16..32].iter().all(|&byte| byte == 0));
    assert_eq!(vpd(&mut rig, 0xb2), [0, 0, 0, 0]);
    let cdb = [0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0];
    let capacity = rig.send(&cdb).good().data;
    assert_eq!(capacity[7..16], [15, 0, 0, 0x10, 0, 0, 0, 0, 0], "no LBPME");
}

#[test]
fn read_capacity() {
    let mut rig = Rig::new();
    let ten = rig.send(&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0]).good();
    assert_eq!(ten.data, [0, 0, 0, 127, 0, 0, 2, 0]);
    // SERVICE ACTION IN (16), READ CAPACITY (16), allocation length 32.
    let cdb = [0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0];
    let sixteen = rig.send(&cdb).good().data;
    let start = [0, 0, 0, 0, 0, 0, 0, 127, 0, 0, 2, 0, 0, 3, 0xc0, 0];
    assert_eq!(sixteen[..16], start, "exponent 3, LBPME, LBPRZ");
    assert_eq!(sixteen.len(), 32);

    let mut big = config(BlockSize::B512, 128);
    big.blocks = 1 << 33;
    let lu = crate::lu::LogicalUnit::new(big).unwrap();
    rig.lu = lu;
    let ten = rig.send(&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0]).good();
    assert_eq!(ten.data[..4], [0xff; 4]);
}

#[test]
fn report_luns() {
    let mut rig = Rig::new();
    rig.luns = [0, 1, 300].map(|n| LunId::new(n).unwrap()).to_vec();
    // REPORT LUNS, SELECT REPORT 0, allocation length 512.
    let cdb = [0xa0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0];
    let data = rig.send(&cdb).good().data;
    let mut expected = vec![0, 0, 0, 24, 0, 0, 0, 0];
    expected.extend([0, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend([0, 1, 0, 0, 0, 0, 0, 0]);
    expected.extend([0x41, 0x2c, 0, 0, 0, 0, 0, 0]);
    assert_eq!(data, expected);
    let well_known = [0xa0, 0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0];
    assert_eq!(rig.send(&well_known).good().data, [0; 8]);
    let reserved = [0xa0, 0, 3, 0, 0, 0, 0, 0, 2, 0, 0, 0];
    assert_eq!(rig.send(&reserved).check(), (5, 0x24, 0));
}

#[test]
fn absent_lun_reports_unsupported() {
    let luns = [LunId::ZERO];
    let send = |cdb: &[u8]| {
        let expected = Expected {
            data_out: 0,
            data_in: 255,
        };
        let attribute = TaskAttribute::Simple;
        respond_absent(&Request {
            nexus: A,
            cdb,
            opcode: Opcode::of(cdb),
            expected,
            attribute,
            luns: &luns,
            read_only: false,
        })
    };
    let inquiry = send(&[0x12, 0, 0, 0, 36, 0]);
    let crate::step::DataIn::Inline(data) = inquiry.data_in else {
        panic!()
    };
    assert_eq!((data[0], data.len()), (0x7f, 36));
    assert_eq!(&data[8..], b"RISER   VIRTUAL DISK    0001");
    assert_eq!(inquiry.residual_in, Residual::Underflow(255 - 36));
    // An allocation length of zero is not an error.
    assert_eq!(send(&[0x12, 0, 0, 0, 0, 0]).status, Status::Good);
    let ready = send(&[0, 0, 0, 0, 0, 0]);
    let sense = ready.parsed_sense().unwrap();
    assert_eq!((sense.key as u8, sense.additional.code), (5, 0x25));
    let request = send(&[0x03, 0, 0, 0, 252, 0]);
    assert_eq!(request.status, Status::Good);
    let luns = send(&[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 0, 0]);
    assert_eq!(luns.data_in.len(), 16);
    assert_eq!(send(&[]).status, Status::CheckCondition);
    assert_eq!(send(&[0x12]).status, Status::CheckCondition);
}
