"""dev/bench/check_kernels.py, on what nvcc and nvdisasm write of good kernels and, with one change, of bad ones."""

import pytest

import check_kernels

PTX = """
.visible .entry _ZN4cuda22dequantize_mean_kernelI4Bf16Lb0EEEvPfPKh13PayloadLayoutmiPKf(
	mul.rn.f32 	%f1, %f2, %f3;
	add.rn.f32 	%f4, %f1, %f5;
	@%p1 st.global.v4.f32 	[%rd1], {%f1, %f2, %f3, %f4};
.visible .entry _ZN4cuda9attention14forward_kernelILi64EEEvP13__nv_bfloat16PfPKS2_ii(
	fma.rn.f32 	%f1, %f2, %f3, %f4;
	st.global.f32 	[%rd1], %f1;
	st.global.cg.v4.s32 	[%rd2], {%r1, %r2, %r3, %r4};
.visible .entry _ZN4cuda19write_header_kernelEP13PayloadHeaderS0_(
	st.global.u32 	[%rd1], %r1;
"""
LOADS = [f"        /*00{i}0*/              @!P0 LDG.E.U16.CONSTANT R{20 + i}, desc[UR4][R2.64+{i}] ;" for i in range(4)]
USES = [f"        /*01{i}0*/                   FMUL R{30 + i}, R{20 + i}, R40 ;" for i in range(4)]
NAME = "dequantize_mean_kernel<Bf16, false>"


def sass(lines):
    section = "\t.section\t.text._ZN4cuda22dequantize_mean_kernelI4Bf16Lb0EEEvPfPKh13PayloadLayoutmiPKf,"
    return check_kernels.kernels_of_sass("\n".join([section, *lines]))


def test_kernels_are_told_apart_by_their_names():
    assert list(check_kernels.kernels_of_ptx(PTX)) == [NAME, "attention::forward_kernel<64>", "write_header_kernel"]


def test_packs_that_are_stored_word_by_word_are_found():
    assert check_kernels.narrow_stores(check_kernels.kernels_of_ptx(PTX)) == []
    split = PTX.replace("st.global.cg.v4.s32 	[%rd2], {%r1, %r2, %r3, %r4}", "st.global.u32 	[%rd2], %r1")
    assert check_kernels.narrow_stores(check_kernels.kernels_of_ptx(split)) == [
        "attention::forward_kernel<64> stores words of 4 bytes"]


def test_a_fused_multiplication_and_addition_of_the_wire_is_found():
    apart = check_kernels.kernels_of_ptx(PTX)
    assert check_kernels.contractions(apart, apart) == []
    fused = check_kernels.kernels_of_ptx(PTX.replace("add.rn.f32 	%f4, %f1, %f5", "fma.rn.f32 	%f4, %f2, %f3, %f5"))
    assert check_kernels.contractions(fused, apart) == [f"{NAME} has fused a multiplication and an addition"]


def test_a_value_that_is_used_before_all_are_loaded_is_found():
    assert check_kernels.late_loads(sass([*LOADS, *USES])) == []
    late = sass([*LOADS[:3], USES[0], LOADS[3], *USES[1:]])
    assert check_kernels.late_loads(late) == [f"{NAME} has 3 loads in flight, not 4"]


@pytest.mark.parametrize("values,wrong", [((64, 0, 0, 0), []), ((65, 0, 0, 0), [f"{NAME} has 65 registers"]),
                                          ((40, 4, 8, 0), [f"{NAME} spills"])])
def test_registers_beyond_the_limit_and_spills_are_found(values, wrong):
    rest = {"row_sums_kernel<Fp32>": (80, 0, 0, 256)}
    found = check_kernels.too_many_registers({NAME: values, **rest}, "sm_90")
    assert [line.split(" on ")[0] for line in found] == wrong
    assert check_kernels.too_many_registers({NAME: (64, 0, 0, 0)}, "sm_90")[0].startswith("there is no kernel")
