//! A single type for the state machines of all commands, so that we don't need to allocate.

use super::cache::Flush;
use super::compare_and_write::CompareAndWrite;
use super::format_unit::FormatUnit;
use super::lba_status::GetLbaStatus;
use super::mode_select::ModeSelect;
use super::or_write::OrWrite;
use super::persistent_reserve::ReserveOut;
use super::plan::{Context, Next, PlanResult, Planner, Steps};
use super::read_write::{Read, Write};
use super::unmap::Unmap;
use super::verify::Verify;
use super::write_same::WriteSame;
use crate::cdb::Cdb;
use crate::sense::Sense;
use crate::step::StepResult;

/// A function that checks a CDB and creates the state machine of the command.
pub(crate) type PlanFn = fn(&Planner<'_>, &Cdb) -> PlanResult<Machine>;

macro_rules! machines {
    ($($name:ident),* $(,)?) => {
        /// State of a command after the first step.
        #[derive(Debug)]
        pub(crate) enum Machine {
            $($name($name)),*
        }

        $(impl From<$name> for Machine {
            fn from(machine: $name) -> Self {
                Self::$name(machine)
            }
        })*

        impl Steps for Machine {
            fn advance(
                &mut self,
                context: &mut Context<'_>,
                result: StepResult,
            ) -> Result<Next, Sense> {
                match self {
                    $(Self::$name(machine) => machine.advance(context, result)),*
                }
            }
        }
    };
}

machines! {
    Read,
    Write,
    Verify,
    CompareAndWrite,
    OrWrite,
    WriteSame,
    Unmap,
    GetLbaStatus,
    FormatUnit,
    ModeSelect,
    ReserveOut,
    Flush,
}
