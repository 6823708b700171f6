//! FORMAT UNIT (SBC-4 5.4).
//!
//! This erases all blocks and may change the type of the protection information. There are no
//! defect lists and there is nothing to certify. As for SYNCHRONIZE CACHE, we ignore IMMED and only
//! return status when the medium is formatted.
//!
//! If a FORMAT UNIT is aborted or fails, some of the blocks may have been erased, but the medium can
//! still be used with the previous type. This is also true after a crash: the protection information
//! of an erased block has all bits set, which is valid for any type.

use super::plan::{Context, Next, Plan, PlanResult, Planner, Steps};
use crate::cdb::Cdb;
use crate::config::ProtectionType::{self, Type1, Type2, Type3};
use crate::data::cdb::format_unit::{DEFECT_LIST_FORMAT, FMTDATA, FMTPINFO, LONGLIST};
use crate::data::field::Field;
use crate::data::format_unit::{
    DCRT, DPRY, FOV, IP, PROTECTION_FIELD_USAGE, STPF, long_header, short_header,
};
use crate::lu::LogicalUnit;
use crate::protection::ProtectionChange;
use crate::sense::Sense;
use crate::step::{BlockOp, DataIn, StepResult};

/// Protection type for each FMTPINFO and PROTECTION FIELD USAGE (SBC-4 table 42). All other
/// combinations are reserved.
static TYPES: [&[Option<ProtectionType>]; 4] =
    [&[None], &[], &[Some(Type1)], &[Some(Type2), Some(Type3)]];

/// State of a FORMAT UNIT.
#[derive(Debug)]
pub(crate) struct FormatUnit {
    /// Types that can be selected in the parameter list.
    types: &'static [Option<ProtectionType>],
    is_long: bool,
    stage: FormatStage,
}

/// ```text
/// Receiving -> Erasing -> (response)
///                  \----> Changing -> (response)
/// ```
#[derive(Clone, Copy, Debug)]
enum FormatStage {
    /// Waiting for the parameter list.
    Receiving,
    /// Erasing all blocks before the medium is formatted with this type.
    Erasing(Option<ProtectionType>),
    /// Storing the new type.
    Changing,
}

pub(crate) fn plan_format_unit<M: From<FormatUnit>>(
    planner: &Planner<'_>,
    cdb: &Cdb,
) -> PlanResult<M> {
    let types = TYPES[usize::from(cdb.get(FMTPINFO))];
    let allows = |protection_type: &Option<_>| planner.lu.config().allows_format(*protection_type);
    if !types.iter().any(allows) {
        return Err(Sense::cdb_field(1, Some(FMTPINFO.highest_bit())).into());
    }
    // Without defect lists, we only support the default format.
    if cdb.get(DEFECT_LIST_FORMAT) != 0 {
        return Err(Sense::cdb_field(1, Some(DEFECT_LIST_FORMAT.highest_bit())).into());
    }
    let mut format = FormatUnit {
        types,
        is_long: cdb.get(LONGLIST),
        stage: FormatStage::Receiving,
    };
    if cdb.get(FMTDATA) {
        let len = match format.is_long {
            true => long_header::LEN,
            false => short_header::LEN,
        };
        return planner.list(len as u32, format.into());
    }
    // PROTECTION FIELD USAGE is zero.
    let Some(protection_type) = types.first().copied().filter(allows) else {
        return Err(Sense::cdb_field(1, Some(FMTPINFO.highest_bit())).into());
    };
    Ok(Plan {
        first: format.erase(planner.lu, protection_type),
        machine: Some(format.into()),
        ..Plan::good()
    })
}

impl FormatUnit {
    /// Checks the parameter list and returns the protection type.
    fn parse(&self, context: &Context<'_>) -> Result<Option<ProtectionType>, Sense> {
        let mut list = [0; long_header::LEN];
        let list = match self.is_long {
            true => &mut list[..],
            false => &mut list[..short_header::LEN],
        };
        context.data.read(0, list);
        let is_set = |field: Field<bool>| field.get(list) == Some(true);
        let has_options = is_set(FOV);
        // Without FOV, all options must be zero. With it, we support any of these for a medium
        // without defects.
        for option in [DPRY, DCRT, STPF] {
            if !has_options && is_set(option) {
                return Err(Sense::parameter_field(1, Some(option.highest_bit())));
            }
        }
        // Initialization patterns are optional.
        if is_set(IP) {
            return Err(Sense::parameter_field(1, Some(IP.highest_bit())));
        }
        if self.is_long {
            check_long(list)?;
        } else if short_header::DEFECT_LIST_LENGTH.get(list) != Some(0) {
            let byte = short_header::DEFECT_LIST_LENGTH.at();
            return Err(Sense::parameter_field(byte as u16, None));
        }
        let usage = PROTECTION_FIELD_USAGE.get(list).unwrap_or_default();
        let selected = self.types.get(usize::from(usage)).copied();
        let allows = |protection_type: &_| context.lu.config().allows_format(*protection_type);
        let refused = Sense::parameter_field(0, Some(PROTECTION_FIELD_USAGE.highest_bit()));
        selected.filter(allows).ok_or(refused)
    }

    /// Erases all blocks and their protection information.
    fn erase(&mut self, lu: &LogicalUnit, protection_type: Option<ProtectionType>) -> Next {
        self.stage = FormatStage::Erasing(protection_type);
        Next::Block(BlockOp::WriteZeroes {
            offset: 0,
            len: lu.capacity_bytes(),
            unmap: lu.config().is_thin(),
            // The type must not be stored before this.
            fua: true,
        })
    }
}

/// Checks the fields that are only present in a long header.
fn check_long(list: &[u8]) -> Result<(), Sense> {
    use long_header::{DEFECT_LIST_LENGTH, PROTECTION_INFORMATION, PROTECTION_INTERVAL_EXPONENT};
    // The protection interval is always a block.
    for field in [PROTECTION_INFORMATION, PROTECTION_INTERVAL_EXPONENT] {
        if field.get(list) != Some(0) {
            let byte = field.at() as u16;
            return Err(Sense::parameter_field(byte, Some(field.highest_bit())));
        }
    }
    if DEFECT_LIST_LENGTH.get(list) != Some(0) {
        let byte = DEFECT_LIST_LENGTH.at() as u16;
        return Err(Sense::parameter_field(byte, None));
    }
    Ok(())
}

impl Steps for FormatUnit {
    fn advance(&mut self, context: &mut Context<'_>, _result: StepResult) -> Result<Next, Sense> {
        match self.stage {
            FormatStage::Receiving => {
                let protection_type = self.parse(context)?;
                Ok(self.erase(context.lu, protection_type))
            }
            FormatStage::Erasing(protection_type) => {
                if !context.lu.config().stores_protection_type() {
                    return Ok(Next::Respond(DataIn::None));
                }
                // Store the current type as well, because it may not be on the medium after a
                // failed format.
                self.stage = FormatStage::Changing;
                Ok(Next::Block(BlockOp::ChangeProtection(ProtectionChange {
                    protection_type,
                    nexus: context.nexus,
                })))
            }
            FormatStage::Changing => Ok(Next::Respond(DataIn::None)),
        }
    }
}
