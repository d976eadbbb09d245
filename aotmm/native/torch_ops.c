int aotmm_x;
