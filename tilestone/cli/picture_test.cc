#include "tilestone/cli/picture.h"

#include <gtest/gtest.h>

namespace tilestone::cli::picture_test {

StoredTensor tensor(Dims shape, std::vector<Box> boxes) {
  StoredTensor out;
  out.shape = std::move(shape);
  for (Box& box : boxes) {
    StoredChunk chunk;
    chunk.box = std::move(box);
    out.chunks.push_back(std::move(chunk));
  }
  return out;
}

TEST(Picture, TwoDimsShowEachChunkByItsLetter) {
  const Picture picture = draw_chunks(
      tensor({4, 4}, {{{0, 0}, {2, 2}}, {{0, 2}, {2, 2}}, {{2, 0}, {2, 2}}, {{2, 2}, {2, 2}}}));
  EXPECT_EQ(picture.row_dim, 0);
  EXPECT_EQ(picture.column_dim, 1);
  EXPECT_EQ(picture.lines, (std::vector<std::string>{"AABB", "AABB", "CCDD", "CCDD"}));
}

TEST(Picture, OneDimIsOneRowAndAHoleIsADot) {
  const Picture picture = draw_chunks(tensor({6}, {{{0}, {2}}, {{4}, {2}}}));
  EXPECT_EQ(picture.lines, (std::vector<std::string>{"AA..BB"}));
}

TEST(Picture, LargeTensorsAreScaledToTheLimits) {
  const Picture picture =
      draw_chunks(tensor({1000, 1000}, {{{0, 0}, {500, 1000}}, {{500, 0}, {500, 1000}}}), 8, 4);
  EXPECT_EQ(picture.lines,
            (std::vector<std::string>{"AAAAAAAA", "AAAAAAAA", "BBBBBBBB", "BBBBBBBB"}));
}

TEST(Picture, TheDimsWithMostCutsAreDrawn) {
  const Picture picture =
      draw_chunks(tensor({2, 1, 3}, {{{0, 0, 0}, {1, 1, 3}}, {{1, 0, 0}, {1, 1, 3}}}));
  EXPECT_EQ(picture.row_dim, 0);
  EXPECT_EQ(picture.column_dim, 2);
  EXPECT_EQ(picture.lines, (std::vector<std::string>{"AAA", "BBB"}));
}

TEST(Picture, AScalarIsOneCellAndAnEmptyTensorNone) {
  EXPECT_EQ(draw_chunks(tensor({}, {{{}, {}}})).lines, std::vector<std::string>{"A"});
  EXPECT_TRUE(draw_chunks(tensor({0, 4}, {{{0, 0}, {0, 4}}})).lines.empty());
}

}  // namespace tilestone::cli::picture_test
