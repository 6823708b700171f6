//! Checks the information returned by a unit: INQUIRY with all pages, MODE SENSE, and REPORT
//! SUPPORTED OPERATION CODES. The format is compared with SPC-4 and SBC-3, with other responses,
//! and with the settings of the unit.

use std::collections::BTreeMap;

use riser_scsi::step::Status;

use super::disk::{
    BLOCK, Code, MAX_COMPARE, MAX_DESCRIPTORS, MAX_SAME, MAX_TRANSFER, MAX_UNMAP, Offer,
};
use super::unit::{Device, sense};

const INVALID_FIELD: Code = (5, 0x24, 0);
const SAVING_NOT_SUPPORTED: Code = (5, 0x39, 0);

/// Buffer size that is large enough for any response.
const ENOUGH: u16 = 8192;

/// A command without its allocation length.
#[derive(Clone, Copy, Debug, bolero::TypeGenerator)]
enum Question {
    Inquiry {
        vital: bool,
        page: u8,
    },
    ModeSense {
        is_long: bool,
        no_descriptors: bool,
        #[generator(0..4u8)]
        control: u8,
        #[generator(0..64u8)]
        page: u8,
        subpage: u8,
    },
    Codes {
        #[generator(0..8u8)]
        option: u8,
        code: u8,
        #[generator(0..32u16)]
        action: u16,
        timeouts: bool,
    },
}

impl Question {
    fn cdb(self, allocation: u16) -> Vec<u8> {
        let [high, low] = allocation.to_be_bytes();
        match self {
            Self::Inquiry { vital, page } => vec![0x12, vital.into(), page, high, low, 0],
            Self::ModeSense {
                is_long,
                no_descriptors,
                control,
                page,
                subpage,
            } => {
                let (flags, page) = (u8::from(no_descriptors) << 3, control << 6 | page);
                match is_long {
                    true => vec![0x5a, flags, page, subpage, 0, 0, 0, high, low, 0],
                    false => vec![0x1a, flags, page, subpage, allocation.min(255) as u8, 0],
                }
            }
            Self::Codes {
                option,
                code,
                action,
                timeouts,
            } => {
                let option = u8::from(timeouts) << 7 | option;
                let action = action.to_be_bytes();
                let [a, b] = action;
                vec![0xa3, 0x0c, option, code, a, b, 0, 0, high, low, 0, 0]
            }
        }
    }
}

/// Returns the full response, or the error code.
fn query(device: &mut Device, question: Question) -> Result<Vec<u8>, Code> {
    respond(device, &question.cdb(ENOUGH))
}

fn respond(device: &mut Device, cdb: &[u8]) -> Result<Vec<u8>, Code> {
    let offer = Offer {
        data_out: &[],
        data_in: ENOUGH.into(),
    };
    let (response, data) = device.run(0, cdb, &offer);
    match response.status {
        Status::Good => Ok(data),
        Status::CheckCondition => Err(sense(&response.sense).0),
        status => panic!("{cdb:02x?}: {status:?}"),
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |n, byte| n << 8 | u64::from(*byte))
}

/// Returns the vital product data pages listed in page 00h (SPC-4 7.8.9).
fn vital_pages(device: &mut Device) -> Vec<u8> {
    let list = Question::Inquiry {
        vital: true,
        page: 0,
    };
    let data = query(device, list).expect("a page that is mandatory");
    let pages = data[4..].to_vec();
    assert!(pages.is_sorted(), "{pages:02x?}");
    assert!(pages.contains(&0) && pages.contains(&0x83), "{pages:02x?}");
    pages
}

fn check_inquiry(device: &mut Device, vital: bool, page: u8, result: Result<Vec<u8>, Code>) {
    if !vital {
        let Ok(data) = result else {
            assert!(page != 0 && result == Err(INVALID_FIELD), "{result:02x?}");
            return;
        };
        // SPC-4 6.4.2: setting the page code without EVPD is an error.
        assert_eq!(page, 0);
        assert!(data.len() >= 36);
        assert_eq!((data[0], data[1] & 0x80), (0, 0), "a disk that stays");
        // SPC-3 or later, and the response data format.
        assert!(data[2] >= 5 && data[3] & 0x0f == 2);
        assert_eq!(usize::from(data[4]), data.len() - 5);
        assert_eq!(&data[8..36], b"FUZZ    DISK            1   ");
        return;
    }
    let pages = vital_pages(device);
    assert_eq!(
        result.is_ok(),
        pages.contains(&page),
        "{page:02x}: {result:02x?}"
    );
    let data = match result {
        Ok(data) => data,
        Err(code) => return assert_eq!(code, INVALID_FIELD),
    };
    assert_eq!((data[0], data[1]), (0, page));
    assert_eq!(number(&data[2..4]) as usize, data.len() - 4);
    match page {
        // The serial number is right-aligned (SPC-4 7.8.16).
        0x80 => assert_eq!(data[4..].trim_ascii(), b"1"),
        0x83 => check_designators(&data[4..]),
        // SBC-3 6.6.4.
        0xb0 => {
            assert_eq!(data.len(), 64);
            assert_eq!((data[4] & 1, data[5]), (1, MAX_COMPARE as u8));
            assert_eq!(number(&data[8..12]), MAX_TRANSFER);
            assert_eq!(number(&data[20..24]), MAX_UNMAP);
            assert_eq!(number(&data[24..28]) as usize, MAX_DESCRIPTORS);
            assert_eq!(number(&data[36..44]), MAX_SAME);
        }
        // SBC-3 6.6.2: non-rotating.
        0xb1 => assert_eq!((data.len(), number(&data[4..6])), (64, 1)),
        // SBC-3 6.6.6: UNMAP, both sizes of WRITE SAME, unmapped blocks are zero, thin
        // provisioning.
        0xb2 => assert_eq!((data[5] & 0xe4, data[6] & 7), (0xe4, 2)),
        _ => {}
    }
}

/// SPC-4 7.8.6: there must be at least one designator for the unit that is globally unique.
fn check_designators(mut data: &[u8]) {
    let mut names = 0;
    while !data.is_empty() {
        let (kind, association) = (data[1] & 0x0f, data[1] >> 4 & 3);
        let len = usize::from(data[3]);
        let designator = &data[4..4 + len];
        match kind {
            // NAA: 8 bytes, or 16 bytes for IEEE Registered Extended.
            3 => assert_eq!(len, if designator[0] >> 4 == 6 { 16 } else { 8 }),
            // EUI-64, and a UTF-8 name that is padded with zeroes.
            2 => assert!(matches!(len, 8 | 12 | 16)),
            8 => assert!(len.is_multiple_of(4) && designator.ends_with(&[0])),
            _ => {}
        }
        names += usize::from(association == 0 && matches!(kind, 2 | 3 | 8));
        data = &data[4 + len..];
    }
    assert!(names > 0);
}

/// Returns the pages after the header and block descriptor, by page code (SPC-4 7.5).
fn mode_pages(data: &[u8], is_long: bool, no_descriptors: bool) -> BTreeMap<(u8, u8), Vec<u8>> {
    let (field, header, descriptors) = match is_long {
        true => (2, 8, number(&data[6..8]) as usize),
        false => (1, 4, usize::from(data[3])),
    };
    assert_eq!(number(&data[..field]) as usize, data.len() - field);
    assert!(!no_descriptors || descriptors == 0);
    if descriptors > 0 {
        assert_eq!(descriptors, 8, "the descriptor that is not long");
        let descriptor = &data[header..header + 8];
        assert_eq!(number(&descriptor[5..8]) as usize, BLOCK);
    }
    let mut rest = &data[header + descriptors..];
    let mut pages = BTreeMap::new();
    while !rest.is_empty() {
        let code = rest[0] & 0x3f;
        let (subpage, begin, len) = match rest[0] & 0x40 {
            0 => (0, 2, usize::from(rest[1])),
            _ => (rest[1], 4, number(&rest[2..4]) as usize),
        };
        let page = rest[begin..begin + len].to_vec();
        assert_eq!(
            pages.insert((code, subpage), page),
            None,
            "{code:02x} twice"
        );
        rest = &rest[begin + len..];
    }
    pages
}

fn check_mode_sense(device: &mut Device, question: Question, result: Result<Vec<u8>, Code>) {
    let Question::ModeSense {
        is_long,
        no_descriptors,
        control,
        page,
        subpage,
    } = question
    else {
        unreachable!("it is one");
    };
    let all = Question::ModeSense {
        is_long: true,
        no_descriptors: true,
        control: 0,
        page: 0x3f,
        subpage: 0xff,
    };
    let all = mode_pages(&query(device, all).expect("all pages"), true, true);
    let is_requested = |(p, s): &(u8, u8)| {
        (page == 0x3f || *p == page)
            && match subpage {
                0xff => true,
                subpage => *s == subpage,
            }
    };
    let requested: Vec<_> = all.keys().copied().filter(is_requested).collect();
    // For the page code of all pages, no other subpage is defined.
    let is_there = !requested.is_empty() && (page != 0x3f || matches!(subpage, 0 | 0xff));
    match result {
        Ok(data) => {
            assert!(is_there && control != 3, "{question:02x?}");
            let pages = mode_pages(&data, is_long, no_descriptors);
            assert_eq!(pages.keys().copied().collect::<Vec<_>>(), requested);
            // Caching: WCE (SBC-3 6.5.5). The current and default values must match the settings.
            if let Some(caching) = pages.get(&(8, 0)).filter(|_| control != 1) {
                assert_eq!((caching.len(), caching[0] & 4), (18, 4));
            }
            // All values must have the same length as the mask of changeable values.
            assert!(
                pages
                    .iter()
                    .all(|(code, page)| all[code].len() == page.len())
            );
        }
        Err(SAVING_NOT_SUPPORTED) => assert_eq!(control, 3),
        Err(code) => {
            assert_eq!(code, INVALID_FIELD, "{question:02x?}");
            assert!(!is_there, "{question:02x?}");
        }
    }
}

/// Operation codes supported by the disk in the model, and their CDB lengths.
const DISK: [(u8, usize); 24] = [
    (0x00, 6),
    (0x03, 6),
    (0x08, 6),
    (0x0a, 6),
    (0x12, 6),
    (0x16, 6),
    (0x17, 6),
    (0x1a, 6),
    (0x1b, 6),
    (0x28, 10),
    (0x2a, 10),
    (0x2e, 10),
    (0x2f, 10),
    (0x35, 10),
    (0x41, 10),
    (0x42, 10),
    (0x5a, 10),
    (0x88, 16),
    (0x89, 16),
    (0x8a, 16),
    (0x8b, 16),
    (0x8f, 16),
    (0x93, 16),
    (0xa0, 12),
];

/// Returns the commands listed by a unit by operation code and service action (SPC-4 6.35.2), and
/// their CDB lengths.
fn listed(data: &[u8], timeouts: bool) -> BTreeMap<(u8, Option<u16>), usize> {
    assert_eq!(number(&data[..4]) as usize, data.len() - 4);
    let len = if timeouts { 20 } else { 8 };
    let mut all = BTreeMap::new();
    assert!((data.len() - 4).is_multiple_of(len));
    for entry in data[4..].chunks(len) {
        assert_eq!(entry[5] & 2 != 0, timeouts, "CTDP");
        let action = (entry[5] & 1 != 0).then(|| number(&entry[2..4]) as u16);
        let cdb = number(&entry[6..8]) as usize;
        let known = all.insert((entry[0], action), cdb);
        assert_eq!(known, None, "{:02x} {action:?} twice", entry[0]);
    }
    for (code, len) in DISK {
        assert_eq!(all.get(&(code, None)), Some(&len), "{code:02x}");
    }
    all
}

fn check_codes(device: &mut Device, question: Question, result: Result<Vec<u8>, Code>) {
    let Question::Codes {
        option,
        code,
        action,
        timeouts,
    } = question
    else {
        unreachable!("it is one");
    };
    let list = Question::Codes {
        option: 0,
        code: 0,
        action: 0,
        timeouts: false,
    };
    let all = listed(&query(device, list).expect("all commands"), false);
    let has_actions = all.keys().any(|(c, action)| *c == code && action.is_some());
    let is_plain = all.contains_key(&(code, None));
    // A service action was requested for a code without service actions, or missing for a code that
    // has them (SPC-4 table 244).
    let is_refused = match option {
        0 => false,
        1 => has_actions,
        2 => is_plain,
        3 => false,
        _ => true,
    };
    let data = match result {
        Ok(data) => data,
        Err(error) => {
            assert!(
                is_refused && error == INVALID_FIELD,
                "{question:02x?}: {error:02x?}"
            );
            return;
        }
    };
    assert!(!is_refused, "{question:02x?}");
    if option == 0 {
        assert_eq!(listed(&data, timeouts), all);
        return;
    }
    let key = match option {
        1 => (code, None),
        2 => (code, Some(action)),
        // For a code without service actions, only zero is valid (SPC-4 table 244).
        _ if is_plain && action == 0 => (code, None),
        _ => (code, Some(action)),
    };
    let support = data[1] & 7;
    match all.get(&key) {
        None => assert_eq!(support, 1, "{question:02x?}"),
        Some(len) => {
            assert_eq!(
                (support, number(&data[2..4]) as usize),
                (3, *len),
                "{question:02x?}"
            );
            let usage = &data[4..4 + len];
            assert_eq!(usage[0], code, "{question:02x?}");
            let has_timeouts = data[1] & 0x80 != 0;
            assert_eq!(data.len(), 4 + len + if has_timeouts { 12 } else { 0 });
        }
    }
}

/// All responses must use the format defined in the standards, must be consistent, and may only be
/// truncated because of the allocation length.
#[test]
fn reports_match_standards() {
    bolero::check!(name = "reports_match_standards")
        .with_type::<Vec<(Question, u16)>>()
        .for_each(|questions| {
            let mut device = Device::new();
            // Clears the unit attention of the new nexus.
            let _ = respond(&mut device, &[0; 6]);
            for (question, allocation) in questions {
                let whole = query(&mut device, *question);
                if let Ok(whole) = &whole {
                    // SPC-4 4.2.5.6. The length field in MODE SENSE (6) is a single byte, and the
                    // command must return an error if this is not enough.
                    let cut = respond(&mut device, &question.cdb(*allocation)).expect("as before");
                    let cdb = question.cdb(*allocation);
                    let field = if cdb[0] == 0x1a {
                        cdb[4].into()
                    } else {
                        *allocation
                    };
                    let len = whole.len().min(field.into());
                    assert!(
                        cut == whole[..len],
                        "{question:02x?} {allocation}: {cut:02x?}"
                    );
                }
                match *question {
                    Question::Inquiry { vital, page } => {
                        check_inquiry(&mut device, vital, page, whole);
                    }
                    Question::ModeSense { .. } => check_mode_sense(&mut device, *question, whole),
                    Question::Codes { .. } => check_codes(&mut device, *question, whole),
                }
            }
        });
}
